"""Get ready for a machine with one GPU and no network: what has to be brought along.

    python bench/gpu/prepare.py

Downloads the wheels that such a machine lacks, for its Python, into ``.whl``, which git ignores; looks whether the
native library is there and newer than its sources; prints what is to be copied, with its size.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".whl"
LIBRARY = ROOT / "yafsdp_cc" / "compression" / "_native.so"
PACKAGES = ("nvtx", "pydantic", "pyyaml")
"""With what they need; torch, numpy, pytest, pytest-xdist and pytest-timeout are taken to be there."""
GLIBC = (28, 27, 24, 17, 5)
"""Versions of wheels for Linux that any machine has, newest first."""
LIMIT = 64 << 20
"""Bytes that may be copied."""


def download(python: str) -> list[Path]:
    """Replace what lies in ``WHEELS``."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{version}_x86_64" for version in GLIBC]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--implementation=cp", f"--python-version={python}", *platforms, "--dest", str(WHEELS), *PACKAGES]
    subprocess.run(command, check=True)
    return sorted(WHEELS.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="that machine's version (%(default)s)")
    options = parser.parse_args()
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    if not LIBRARY.exists():
        sys.exit(f"{LIBRARY.relative_to(ROOT)} is not built: python setup.py build_ext --inplace")
    if LIBRARY.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        print(f"{LIBRARY.relative_to(ROOT)} is older than csrc: python setup.py build_ext --inplace", file=sys.stderr)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
    wheels = download(options.python)
    total = sum(path.stat().st_size for path in (*tracked, LIBRARY, *wheels))
    for path in (*wheels, LIBRARY):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(ROOT)}")
    print(
        f"{total / 1e6:6.2f} MB  with the {len(tracked)} files that git knows; also to be copied: .whl, {LIBRARY.name}"
    )
    if total > LIMIT:
        sys.exit(f"more than {LIMIT >> 20} MiB")


if __name__ == "__main__":
    main()
