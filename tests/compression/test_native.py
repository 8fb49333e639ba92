"""The native extension is asked for, done without, or missed."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.compression import simt
from tests.internals import has_native_kernels
from yafsdp_cc.compression import error_feedback

CPU = torch.device("cpu")
native = pytest.mark.skipif(not has_native_kernels(), reason="the native extension is not built")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where nothing has been loaded yet."""
    monkeypatch.delenv("YAFSDP_CC_NATIVE", raising=False)
    monkeypatch.setattr(error_feedback, "_load", error_feedback._load.__wrapped__)
    error_feedback._ops_for.cache_clear()
    yield
    error_feedback._ops_for.cache_clear()


@pytest.fixture
def unbuilt(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where there was no compiler."""
    monkeypatch.setattr(error_feedback, "LIBRARY", tmp_path / "_native.so")


@pytest.mark.usefixtures("unbuilt")
def test_without_it_plain_torch_is_used_and_that_is_finite_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "yafsdp_cc"):
        assert error_feedback.ops_for(CPU) is None
        assert error_feedback.ops_for(CPU) is None
    assert len(caplog.messages) == 1
    for part in ("by plain torch", "times slower", "is not built", "pip install --no-build-isolation"):
        assert part in caplog.messages[0]


@pytest.mark.usefixtures("unbuilt")
def test_absence_can_be_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"=1, but the native extension is not built; to build: .*pip install"):
        error_feedback.ops_for(CPU)


@pytest.mark.usefixtures("unbuilt")
def test_a_file_that_is_no_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error_feedback.LIBRARY.write_bytes(b"nothing")
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"cannot be loaded \("):
        error_feedback.ops_for(CPU)


@native
@pytest.mark.usefixtures("fresh")
def test_an_old_build_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(error_feedback, "OPERATORS", (*error_feedback.OPERATORS, "added_since"))
    with caplog.at_level(logging.WARNING, "yafsdp_cc"):
        assert error_feedback.ops_for(CPU) is None
    assert len(caplog.messages) == 1
    for part in (str(error_feedback.LIBRARY), "older source, without added_since", "pip install --no-build-isolation"):
        assert part in caplog.messages[0]


@native
@pytest.mark.usefixtures("fresh")
def test_without_nvrtc_plain_torch_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(error_feedback, "NVRTC", tmp_path / "libcaffe2_nvrtc.so")
    with caplog.at_level(logging.WARNING, "yafsdp_cc"):
        assert error_feedback.ops_for(gpu) is None
        assert error_feedback.ops_for(gpu) is None
    assert len(caplog.messages) == 1
    for part in ("by plain torch", "cannot be compiled for cuda:0", str(error_feedback.NVRTC), "No such file", "pip "):
        assert part in caplog.messages[0]
    monkeypatch.setattr(error_feedback, "NVRTC", error_feedback.LIBRARY)
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"=1, but kernels cannot .* there is no nvrtcGetNumSupportedArchs in what"):
        error_feedback.ops_for(gpu)


@native
@pytest.mark.skipif(simt.compiler() is None, reason="no g++")
@pytest.mark.timeout(900)  # it compiles
@pytest.mark.usefixtures("fresh")
def test_a_gpu_is_served_if_kernels_compile_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an NVRTC that knows the architectures 7.5, 8.0 and 9.0."""
    emulator = simt.build(simt.KERNELS)
    library = ctypes.CDLL(str(emulator))
    library.simt_compiled_for.restype = ctypes.c_char_p
    monkeypatch.setattr(error_feedback, "NVRTC", emulator)
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "1")
    try:
        for index, (capability, option) in enumerate([(80, b"sm_80"), (86, b"compute_80"), (121, b"compute_90")]):
            library.simt_gpu(capability, None)
            assert error_feedback.ops_for(torch.device("cuda", index)) is not None
            assert library.simt_compiled_for() == b"-arch=" + option
        library.simt_gpu(75, None)
        with pytest.raises(RuntimeError, match=r"compute capability 8.0 and higher, this GPU has 7.5"):
            error_feedback.ops_for(torch.device("cuda", 3))
        library.simt_gpu(90, b"encode_kernel<Nothing, 4, false>")
        with pytest.raises(RuntimeError, match=r"does not compile encode_kernel<Nothing.*=sm_90.*_NATIVE=0.*: refused"):
            error_feedback.ops_for(torch.device("cuda", 4))
    finally:
        library.simt_gpu(90, None)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "0")
    assert error_feedback.ops_for(CPU) is None
    assert not caplog.messages
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "yes")
    with pytest.raises(ValueError, match="YAFSDP_CC_NATIVE=yes: 0, 1, auto are known"):
        error_feedback.ops_for(CPU)


@pytest.fixture
def stale(tmp_path: Path) -> Path:
    """Where ``build_library`` would put the library: an older one."""
    library = tmp_path / "yafsdp_cc" / "compression" / "_native.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"older")
    return library


def build_library(folder: Path, compiler: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}", f"--build-temp={folder / 'temp'}"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"YAFSDP_CC_NATIVE": "1", "CXX": compiler, "CC": compiler},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that the compiler can be ended with it
    )


def test_a_build_that_is_killed_leaves_the_old_library(stale: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ntouch {started}\nsleep 60\n")
    compiler.chmod(0o755)
    build = build_library(tmp_path, str(compiler))
    while not started.exists():
        assert build.poll() is None, "the build ended before it compiled"
        time.sleep(0.02)
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    assert stale.read_bytes() == b"older"


def test_a_build_that_fails_leaves_no_library_of_other_sources(stale: Path, tmp_path: Path) -> None:
    assert build_library(tmp_path, "false").wait() != 0
    assert not stale.exists()
