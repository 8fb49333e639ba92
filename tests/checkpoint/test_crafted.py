"""Checkpoints that somebody has made so that they do harm, with checksums that are right: each is an error that names
the file, and nothing runs, hangs or fills the memory.

Of a table of contents, an extra file and the entries of a data file bytes are changed, cut off and repeated, and
numbers are put out of range; others are made by hand. Each load has a second and a gigabyte beyond what it needs.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import traceback
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata

import yafsdp_cc
from tests.checkpoint.jobs import in_a_process
from tests.checkpoint.test_damage import own, reset, small
from tests.soak import SOAK

pytestmark = pytest.mark.timeout(3600 if SOAK else 300)

CHANGES = 2_000 if SOAK else 60
SECONDS, BYTES = 20, 4 << 30
SEAL = b"yafsdp_cc crc32 %08x"


def written(folder: Path) -> None:
    model, optimizer = small(shards=False)
    reset(model, optimizer, 3.0)
    yafsdp_cc.save(folder / "good", model, optimizer, step=3, name="run")


def sealed(content: bytes) -> bytes:
    return content + SEAL % zlib.crc32(content)


def body_of(table: Path) -> bytes:
    return table.read_bytes()[: -len(SEAL % 0)]


def limited(body: Callable[..., Any]) -> Callable[..., int]:
    """Runs in a process of its own that no file can make large, or hang."""

    def run(*args: Any) -> int:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
        try:
            body(*args)
        except Exception:
            traceback.print_exc()  # of which the other process sees no more than that it has failed
            return 1
        return 0

    return run


def load_all(folder: Path, jobs: tuple[Any, Any]) -> None:
    yafsdp_cc.load(folder, *jobs)


def outcome(
    folder: Path,
    jobs: tuple[Any, Any],
    expected: list[torch.Tensor] | None,
    what: object,
    load: Callable[[Path, tuple[Any, Any]], None] = load_all,
) -> str:
    """Load, and see that an error names the folder and leaves the model, and that what is loaded is what was saved."""
    model, optimizer = jobs
    reset(model, optimizer)
    before = own(model, optimizer)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of this processor: it ends the process, and fails the test
    try:
        load(folder, jobs)
        told = ""
    except (ValueError, pickle.UnpicklingError) as error:
        told = str(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if told:
        assert str(folder) in told, f"{what}: {told}"
        assert len(told) < 10_000, what
        expected = before
    if expected is not None:
        assert all(map(torch.equal, own(model, optimizer), expected)), what
    return told


def changed(chance: random.Random, content: bytes) -> bytes:
    """A few bytes of it are others, or it ends early, or a part comes twice."""
    text = bytearray(content)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(text))
        text[at] = chance.choice((chance.randrange(256), text[at] ^ 1 << chance.randrange(8)))
    if chance.random() < 0.2:
        del text[chance.randrange(len(text)) :]
    elif chance.random() < 0.2:
        start = chance.randrange(len(text))
        text[start:start] = text[start : start + chance.randrange(1, 200)]
    return bytes(text)


def copied(folder: Path) -> tuple[Any, Any, Path, bytes]:
    """Copy the good checkpoint; return jobs that have loaded it, their state, the copy, and its table of contents."""
    jobs, bad = small(shards=False), folder / "bad"
    yafsdp_cc.load(folder / "good", *jobs)
    shutil.copytree(folder / "good", bad)
    return jobs, own(*jobs), bad, body_of(bad / ".metadata")


def all_are_refused_or_equal(folder: Path) -> None:
    chance, refused = random.Random(0), 0
    jobs, expected, bad, body = copied(folder)
    for number in range(CHANGES):
        text = changed(chance, body)
        (bad / ".metadata").write_bytes(text if number % 5 == 0 else sealed(text))
        refused += bool(outcome(bad, jobs, expected, (number, text)))
    assert refused > CHANGES // 2  # of the others a name that nobody reads has changed, or nothing


def test_a_changed_table_of_contents_is_refused_or_says_the_same(tmp_path: Path) -> None:
    assert in_a_process(written, tmp_path) == 0
    assert in_a_process(limited(all_are_refused_or_equal), tmp_path) == 0


# Values out of range --------------------------------------------------------------------------------------------------

STRANGE: list[Any] = [-1, 1 << 40, 1 << 62, 1 << 80, 1.5, None, True, "", "../x", "/dev/zero", "\0", b"x", (), [], {}]
STRANGE += [torch.Size([]), torch.Size([-1]), torch.Size([1 << 62, 1 << 62]), torch.Size([2] * 60), ("model",) * 3]
STRANGE += [torch.float64, torch.strided, [0], ["x"] * 3, {"x": ("y",)}, {(1, 2): 3}, metadata.BytesStorageMetadata()]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all that a table of contents is made of."""
    if is_dataclass(value) and not isinstance(value, metadata.MetadataIndex):
        inner: Any = vars(value).items()
    elif isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        inner = ()
    return [path, *(place for key, each in inner for place in places_in(each, (*path, key)))]


def put(contents: Any, path: tuple[Any, ...], value: Any) -> None:
    *above, last = path
    for key in above:
        contents = vars(contents)[key] if is_dataclass(contents) else contents[key]
    if is_dataclass(contents):
        vars(contents)[last] = value
    else:
        contents[last] = value


def nothing_is_out_of_range(folder: Path) -> None:
    chance, refused = random.Random(1), 0
    jobs, expected, bad, body = copied(folder)
    places = places_in(pickle.loads(body))[1:]
    for _ in range(CHANGES):
        contents, place, value = pickle.loads(body), chance.choice(places), chance.choice(STRANGE)
        put(contents, place, value)
        try:
            (bad / ".metadata").write_bytes(sealed(pickle.dumps(contents)))
        except Exception:
            continue
        refused += bool(outcome(bad, jobs, expected, (place, value)))
    assert refused > CHANGES // 2


def test_values_out_of_range_are_refused_or_change_nothing(tmp_path: Path) -> None:
    assert in_a_process(written, tmp_path) == 0
    assert in_a_process(limited(nothing_is_out_of_range), tmp_path) == 0


# Made by hand ---------------------------------------------------------------------------------------------------------

KINDS = b"ctorch.distributed.checkpoint.metadata\n%s\n"
DEEP = b")" + b"\x85" * 1_000_000
WIDE = b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(100))
"""Tuples in tuples: a million, one in the other; and a hundred of two references each, to one that is written once."""
ENCODED = KINDS % metadata._MEM_FORMAT_ENCODING.__qualname__.encode()
FORGED: dict[str, bytes] = {
    "a number of references that fills the memory": b"Nr\xff\xff\xff\xff.",
    "a length that no file has": b"\x8e" + struct.pack("<Q", 1 << 62) + b".",
    "a frame of a length that no file has": b"\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a text of a length that no file has": b"\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "a number of four billion digits": b"\x8b\xff\xff\xff\x7f.",
    "a deep key": b"}" + DEEP + b"Ns.",
    "a wide key": b"}" + WIDE + b"Ns.",
    "wide keys": b"}(" + WIDE + b"Nu.",
    "a dictionary with a wide key": b"(" + WIDE + b"Nd.",
    "a set of what is wide": b"\x8f(" + WIDE + b"\x90.",
    "a frozen set of what is deep": b"(" + DEEP + b"\x91.",
    "a wide argument": ENCODED + WIDE + b"\x85R.",
    "a wide argument of another call": ENCODED + WIDE + b"\x85\x81.",
    "a wide argument of a third call": b"(" + ENCODED + WIDE + b"o.",
    "an index of indices": b"}" + KINDS % b"MetadataIndex" + b")\x81}(X\x03\x00\x00\x00fqn" + WIDE + b"ubNs.",
    "a wide table": WIDE + b".",
    "a member of an enumeration that is changed": ENCODED + b"K\x01\x85R}X\x07\x00\x00\x00_value_K\x07sb.",
    "a class that is changed": KINDS % b"Metadata" + b"}X\x07\x00\x00\x00versionK\x07sb.",
}


def table_of(size: list[int], sizes: list[list[int]]) -> Callable[[Any], Any]:
    """Return a change of a table of contents, by which a weight has the shape ``size`` and chunks of ``sizes``."""

    def change(contents: Any) -> Any:
        weight = contents.state_dict_metadata["model.0.weight"]
        weight.size = torch.Size(size)
        start = torch.Size([0] * len(size))
        weight.chunks[:] = [metadata.ChunkStorageMetadata(start, torch.Size(each)) for each in sizes]
        return contents

    return change


TABLES: dict[str, Callable[[Any], Any]] = {
    "many dimensions": table_of([2] * 40, [[1] * 40, [2] * 40]),
    "a size that no memory has": table_of([17, 1 << 40], [[17, 1 << 40]]),
    "names of extra files": lambda contents: put(contents, ("storage_meta", "extra_crc32"), "text") or contents,
    "a sum that is a text": lambda contents: put(contents, ("storage_meta", "extra_crc32"), ["text"]) or contents,
}


def forged_are_refused(folder: Path) -> None:
    jobs, bad = small(shards=False), folder / "bad"
    shutil.copytree(folder / "good", bad)
    body = body_of(folder / "good" / ".metadata")
    for name, pickled in FORGED.items():
        for seal in (sealed, bytes):
            (bad / ".metadata").write_bytes(seal(pickled))
            assert outcome(bad, jobs, None, name), name
    assert metadata._MEM_FORMAT_ENCODING(1).value == 1
    for name, change in TABLES.items():
        (bad / ".metadata").write_bytes(sealed(pickle.dumps(change(pickle.loads(body)))))
        assert outcome(bad, jobs, None, name), name


def test_tables_of_contents_made_by_hand_are_refused(tmp_path: Path) -> None:
    assert in_a_process(written, tmp_path) == 0
    assert in_a_process(limited(forged_are_refused), tmp_path) == 0


# Entries and extra files ----------------------------------------------------------------------------------------------


def archive_of(content: bytes, size: int) -> bytes:
    """An archive of torch's with zeros of ``size`` in it, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, b"\0" * size if "/data/" in entry.filename else old.read(entry))
    return buffer.getvalue()


def rewritten(folder: Path, name: str, content: bytes) -> None:
    """Let an entry of the data file, or the extra file, be ``content``, with a sum that is right."""
    contents = pickle.loads(body_of(folder / ".metadata"))
    if name == "extra":
        (folder / "extra_0_of_1.pt").write_bytes(content)
        vars(contents.storage_meta)["extra_crc32"] = [zlib.crc32(content)]
    else:
        [key] = (each for each in contents.storage_data if each.fqn == name)
        place = contents.storage_data[key]
        with (folder / place.relative_path).open("r+b") as file:
            made = replace(place, offset=file.seek(0, os.SEEK_END), length=len(content))
            file.write(content)
        vars(made)["crc32"] = zlib.crc32(content)
        contents.storage_data[key] = made
    (folder / ".metadata").write_bytes(sealed(pickle.dumps(contents)))


def content_of(folder: Path, name: str) -> bytes:
    if name == "extra":
        return (folder / "extra_0_of_1.pt").read_bytes()
    [place] = (p for key, p in pickle.loads(body_of(folder / ".metadata")).storage_data.items() if key.fqn == name)
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


ENTRIES = ["extra", "model.0.weight", "optimizer.param_groups.0.lr"]


def changed_entries(folder: Path) -> None:
    chance, jobs = random.Random(2), small(shards=False)
    for name in ENTRIES:
        content = content_of(folder / "good", name)
        for number in range(CHANGES // 3):
            bad = folder / "bad"
            shutil.copytree(folder / "good", bad)
            text = changed(chance, content)
            rewritten(bad, name, text)
            outcome(bad, jobs, None, (name, number, text))
            shutil.rmtree(bad)
    shutil.copytree(folder / "good", folder / "bad")
    rewritten(folder / "bad", "model.0.weight", archive_of(content_of(folder / "good", "model.0.weight"), 1 << 30))
    assert "compressed" in outcome(folder / "bad", jobs, None, "compressed")


def test_changed_entries_are_refused_or_are_others(tmp_path: Path) -> None:
    assert in_a_process(written, tmp_path) == 0
    assert in_a_process(limited(changed_entries), tmp_path) == 0


# Safetensors ----------------------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
INDICES = [
    "",
    "{",
    "3",
    "[" * 100_000,
    '{"weight_map": 3}',
    '{"weight_map": {"0.weight": 3}}',
    "{}",
    '{"weight_map": []}',
]
INDICES += [
    '{"weight_map": {"0.weight": "gone.safetensors"}}',
    '{"weight_map": {"0.weight": "../x.safetensors"}}',
    "\xff",
]


def only_weights(folder: Path, jobs: tuple[Any, Any]) -> None:
    yafsdp_cc.load_safetensors(folder, jobs[0])


def changed_safetensors(folder: Path) -> None:
    chance, jobs, refused = random.Random(3), small(shards=False), 0
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for number in range(CHANGES):
        path.write_bytes(changed(chance, whole[:end]) + whole[end:])
        refused += bool(outcome(folder, jobs, None, number, only_weights))
    assert refused > CHANGES // 2
    path.write_bytes(whole)
    for text in INDICES:
        (folder / INDEX).write_bytes(text.encode("latin-1"))
        assert outcome(folder, jobs, None, text[:40], only_weights), text[:40]


def written_as_safetensors(folder: Path) -> None:
    save_file({name: each.detach() for name, each in small(shards=False)[0].named_parameters()}, folder)


def test_changed_safetensors_are_refused_or_are_others(tmp_path: Path) -> None:
    assert in_a_process(written_as_safetensors, tmp_path / "model.safetensors") == 0
    assert in_a_process(limited(changed_safetensors), tmp_path) == 0
