"""Entries of a checkpoint's files, beside what ``torch.save`` writes."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.serialization import config

import yafsdp_cc

SHAPES = [(), (0, 3), (1,), (31,), (3, 5), (1024,), (4097,), (300, 70), (2, 1, 4, 8, 16, 9)]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.bool,
    torch.int64,
    torch.uint16,
    torch.float8_e4m3fn,
]


def of_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def entries(path: Path, tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """Save tensors as the buffers of a module; return the bytes of their entries, whose checksums are right."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    yafsdp_cc.save(path, module)
    found = {}
    for index, place in FileSystemReader(path).read_metadata().storage_data.items():
        content = (path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        assert vars(place)["crc32"] == zlib.crc32(content)
        found[index.fqn.removeprefix("model.")] = content
    return found


def records(content: bytes) -> dict[str, tuple[int, bytes]]:
    """The place and the bytes of each record of an archive with right checksums, but for the archive's own id."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        held = {each.filename: (each.header_offset, archive.read(each)) for each in archive.infolist()}
    assert len(held.pop("archive/.data/serialization_id")[1]) == 40
    return held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_entry_is_an_archive_of_torch_save(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"b{number}": of_bytes(dtype, shape) for number, shape in enumerate(SHAPES)}
    for name, content in entries(tmp_path / "saved", tensors).items():
        torch.save(tensors[name], by_torch := io.BytesIO())
        assert len(content) == len(by_torch.getvalue())
        assert records(content) == records(by_torch.getvalue())


def test_an_entry_of_a_view_has_its_elements_alone(tmp_path: Path) -> None:
    whole, pairs = torch.randn(300, 100), torch.randn(40, 60, dtype=torch.complex64)
    views = {
        "rows": whole[7:200],
        "columns": whole[:, 5:90],
        "transposed": whole.t(),
        "expanded": whole[:1].expand(300, 100),
        "one": whole[3, 4],
        "column of one row": whole[:1, 2],
        "conjugate": pairs.conj(),
        "negative": pairs.conj().imag,
    }
    for name, content in entries(tmp_path / "saved", views).items():
        assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), views[name])
        assert len(content) < views[name].nbytes + 2000


@pytest.mark.parametrize(
    "settings",
    [
        lambda: torch.device("meta"),
        lambda: mock.patch.object(config.save, "storage_alignment", 1 << 13),
        torch.inference_mode,
    ],
    ids=["default device", "alignment", "inference mode"],
)
def test_a_checkpoint_is_readable_whatever_torch_is_set_to(
    tmp_path: Path, settings: Callable[[], AbstractContextManager[object]]
) -> None:
    tensors = {"small": torch.randn(7, 11), "large": torch.randn(123, 77)}  # no other test has these shapes
    with settings():
        written = entries(tmp_path / "saved", tensors)
    for name, content in written.items():
        assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), tensors[name])
        records(content)


def test_archives_have_checksums_when_torch_is_told_to_make_them_again(tmp_path: Path) -> None:
    tensors = {"small": torch.randn(13, 11), "large": torch.randn(125, 77)}
    torch.serialization.set_crc32_options(False)
    try:
        entries(tmp_path / "without", tensors)
    finally:
        torch.serialization.set_crc32_options(True)
    for content in entries(tmp_path / "with", tensors).values():
        records(content)


def test_a_subclass_is_saved_with_its_parts(tmp_path: Path) -> None:
    two = TwoTensor(torch.randn(70, 90), torch.randn(70, 90))
    [content] = entries(tmp_path / "saved", {"two": two}).values()
    read = torch.load(io.BytesIO(content), weights_only=False)
    assert torch.equal(read.a, two.a)
    assert torch.equal(read.b, two.b)
