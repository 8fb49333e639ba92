"""Builds the native kernels of ``csrc`` where there is a compiler; everything else is in pyproject.toml.

The result is one library, ``yafsdp_cc/compression/_native.so``, that ``error_feedback.py`` beside it loads. It is no
Python module and uses torch's stable ABI alone, so it belongs to no version of either. ``YAFSDP_CC_NATIVE=0`` builds
none; ``1`` makes a failure an error, where otherwise the package is installed without.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError

ROOT = Path(__file__).resolve().parent
NATIVE = os.environ.get("YAFSDP_CC_NATIVE", "auto")
OLDEST_TORCH = "0x020b000000000000"  # 2.11

FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-g0", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
# Results are those of the plain-torch definitions: no fused multiply-add, nothing reordered. The last two allow
# vectors.
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

LEVELS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "scalar": ["-fno-tree-vectorize", "-fno-tree-slp-vectorize"],
        "sse2": [],
        "avx2": ["-mavx2", "-mbmi"],
        "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mbmi", "-mprefer-vector-width=512"],
    },
    "aarch64": {"scalar": ["-fno-tree-vectorize", "-fno-tree-slp-vectorize"], "neon": []},
}
"""Compiler flags of each instruction set that ``csrc/cpu/level.cpp`` is compiled for."""

ARCHITECTURES = [(80, "11.0"), (90, "11.8"), (100, "12.8"), (120, "12.8")]
"""GPU architectures, and the CUDA version that knows them."""


def torch_home() -> Path | None:
    """Where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def nvcc_for(torch: Path) -> str | None:
    """The compiler of the CUDA sources, if this torch has CUDA."""
    version = re.search(r"^cuda\b.*?=\s*'([\d.]+)'", (torch / "version.py").read_text(), re.MULTILINE)
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None) if version else None


def wanted() -> list[int]:
    """The GPU architectures that TORCH_CUDA_ARCH_LIST names, as in ``8.0;9.0+PTX``; none, if it does not."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    return sorted(int(major) * 10 + int(minor) for major, minor in re.findall(r"(\d+)\.(\d)", named))


class Build(build_ext):
    """Compiles each source once, but ``level.cpp`` for every instruction set, and links all of it."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # rather none than an old one; a process that has it loaded keeps it
        torch = torch_home()
        if torch is None:
            raise CompileError("torch is not installed where this is built: pip install --no-build-isolation")
        include = str(torch / "include")
        machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
        objects = self.compiled(["csrc/ops.cpp", "csrc/cpu/cpu.cpp"], [*FLAGS, "-isystem", include], "torch")
        for level, flags in LEVELS.get(machine, {"scalar": []}).items():
            macros = [f"-DYAFSDP_CC_LEVEL={level}"]
            objects += self.compiled(["csrc/cpu/level.cpp"], FLAGS + EXACT + flags + macros, level)
        cuda, hosts = (sorted(map(os.path.relpath, ROOT.glob(f"csrc/cuda/*.{end}"))) for end in ("cu", "cpp"))
        nvcc = nvcc_for(torch) if cuda else None
        folder = str(torch / "lib")
        if nvcc is not None:
            try:
                more = self.compiled_by_nvcc(nvcc, cuda)
                more += self.compiled(hosts, [*FLAGS, "-isystem", include], "torch")
                # It knows where its runtime is; that is linked statically.
                self.spawn([nvcc, "-shared", *objects, *more, "-o", str(target), f"-L{folder}", "-ltorch_cpu"])
                return
            except (CompileError, ExecError) as error:
                if NATIVE == "1":
                    raise
                self.warn(f"built without kernels for CUDA: {error}")
        self.compiler.link_shared_object(
            objects, str(target), libraries=["torch_cpu"], library_dirs=[folder], target_lang="c++"
        )

    def compiled(self, sources: list[str], flags: list[str], folder: str) -> list[str]:
        target = [("TORCH_TARGET_VERSION", OLDEST_TORCH)]
        where = os.path.join(self.build_temp, folder)
        found: list[str] = self.compiler.compile(sources, where, macros=target, extra_postargs=flags)
        return found

    def compiled_by_nvcc(self, nvcc: str, sources: list[str]) -> list[str]:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        release = re.search(r"release ([\d.]+)", output)
        version = tuple(map(int, (release[1] if release else "11.0").split(".")))
        known = wanted() or [arch for arch, since in ARCHITECTURES if version >= tuple(map(int, since.split(".")))]
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in known]
        codes.append(f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}")
        objects = []
        for source in sources:
            objects.append(os.path.join(self.build_temp, source.replace(os.sep, "_") + ".o"))
            flags = ["-std=c++17", "-O3", "-t0", "--fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden", *codes]
            self.spawn([nvcc, *flags, "-c", source, "-o", objects[-1]])
        return objects


# `sources` are for distributions; `depends` rebuild it.
library = Extension(
    "yafsdp_cc.compression._native",
    sources=["csrc/ops.cpp", "csrc/cpu/cpu.cpp", "csrc/cpu/level.cpp"],
    depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*") if path.is_file()),
    language="c++",
    optional=NATIVE != "1",
)

setup(
    ext_modules=[] if NATIVE == "0" else [library],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
