"""Builds the native kernels of ``csrc`` where there is a compiler; everything else is in pyproject.toml.

The result is one library, ``yafsdp_cc/compression/_native.so``, that ``error_feedback.py`` beside it loads. It is no
Python module and uses torch's stable ABI alone, so it belongs to no version of either. ``YAFSDP_CC_NATIVE=0`` builds
none; ``1`` makes a failure an error, where otherwise the package is installed without.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

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


def torch_home() -> Path | None:
    """Where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def cuda_sources(folder: Path) -> str:
    """Return what NVRTC compiles, where there is a GPU, as rows of a table in C++: the name and text of each file."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh", ".h"))
    return "".join(f'{{"{path.relative_to(folder)}", R"~~~({path.read_text()})~~~"}},\n' for path in files)


class Build(build_ext):
    """Compiles each source once, but ``level.cpp`` for every instruction set, and links all of it."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # of an earlier build; the one in the sources stays until there is a new one
        torch = torch_home()
        if torch is None:
            raise CompileError("torch is not installed where this is built: pip install --no-build-isolation")
        os.makedirs(self.build_temp, exist_ok=True)
        Path(self.build_temp, "sources.inc").write_text(cuda_sources(ROOT / "csrc" / "cuda"))
        flags = [*FLAGS, "-isystem", str(torch / "include"), f"-I{self.build_temp}"]
        cuda = sorted(map(os.path.relpath, ROOT.glob("csrc/cuda/*.cpp")))
        objects = self.compiled(["csrc/ops.cpp", "csrc/cpu/cpu.cpp", *cuda], flags, "torch")
        machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
        for level, more in LEVELS.get(machine, {"scalar": []}).items():
            macros = [f"-DYAFSDP_CC_LEVEL={level}"]
            objects += self.compiled(["csrc/cpu/level.cpp"], FLAGS + EXACT + more + macros, level)
        self.compiler.link_shared_object(
            objects, str(target), libraries=["torch_cpu"], library_dirs=[str(torch / "lib")], target_lang="c++"
        )

    def copy_extensions_to_source(self) -> None:
        """Copy what was built into the package, or remove what lies there if it could not be built."""
        for ext in self.extensions:
            name = self.get_ext_filename(ext.name)
            if not Path(self.build_lib, name).exists():
                (ROOT / name).unlink(missing_ok=True)  # rather none than one of older sources
        super().copy_extensions_to_source()

    def compiled(self, sources: list[str], flags: list[str], folder: str) -> list[str]:
        target = [("TORCH_TARGET_VERSION", OLDEST_TORCH)]
        where = os.path.join(self.build_temp, folder)
        found: list[str] = self.compiler.compile(sources, where, macros=target, extra_postargs=flags)
        return found


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
