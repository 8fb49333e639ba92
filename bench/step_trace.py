"""What somebody who follows one training step has to read: files, functions and the way between them, counted.

    python bench/step_trace.py           # one table: FSDP2, the engine with exact sums, the engine with int8
    python bench/step_trace.py --list    # and each file, with its functions on the way

The third step of a model of three blocks with a tied embedding and head on two gloo ranks: forward, backward,
`clip_grad_norm_` and `AdamW.step`. `sys.setprofile` sees each Python function of the package that is called on rank 0.

* *switches*: two calls after one another, on one thread, of functions in different files of the package. Code of torch
  or of the model in between counts for nothing. *and back*: the same with returns counted like calls.
* *functions*: distinct ones; a comprehension is a part of the function around it.
* *lines*: of all files that were entered; *longest*: of the longest function that was called, from its `def` on.

Each way is counted without and with what makes a sharded tensor of a `torch.Tensor` and what that calls. FSDP2's own
files have nothing of that: theirs is all of `torch.distributed.tensor`. Threads that C++ starts, such as a gloo thread
that runs a callback, are not seen by Python's profilers before 3.12. Counts of one version differ by a function or two
between runs where the engine tries out the links when a model is sharded.
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed.fsdp._fully_shard
import torch.distributed.tensor
from torch import nn
from torch.distributed.fsdp import fully_shard

import yafsdp_cc
from bench.models import GPT, Block, Spec
from tests.ranks import on_ranks

if TYPE_CHECKING:
    from types import FrameType

SPEC = Spec("trace", 3, 32, 2, 64, sequences=2, length=8, rounds=0, steps=0)
STEP = 3
"""The step that is traced: buffers are allocated in the first, and the order of units is known from the second on."""

OURS = Path(yafsdp_cc.__file__).parent
FSDP2 = Path(torch.distributed.fsdp._fully_shard.__file__).parent
TORCH_TENSOR = Path(torch.distributed.tensor.__file__).parent
TENSOR_FILES = {*(OURS / "tensor").glob("*.py")}
"""Our subclass of DTensor."""


class Way(NamedTuple):
    """How a model is sharded, and whose code that is."""

    folders: tuple[Path, ...]
    tensor: tuple[Path, ...]
    """Folders and files of sharded tensors."""
    compression: str | None = None

    def shard(self, model: GPT) -> nn.Module:
        if OURS in self.folders:
            return yafsdp_cc.shard(model, units=[Block], compression=self.compression)
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def leaves_out(self, file: str) -> bool:
        """Whether a file is one of sharded tensors."""
        return any(Path(file).is_relative_to(each) for each in self.tensor)


WAYS = {
    "fsdp2": Way((FSDP2, TORCH_TENSOR), (TORCH_TENSOR,)),
    "exact": Way((OURS,), tuple(TENSOR_FILES)),
    "int8": Way((OURS,), tuple(TENSOR_FILES), "int8"),
}


class Place(NamedTuple):
    """A function: its file, the line where it or its first decorator is, and its name without that of its class."""

    file: str
    line: int
    name: str


class Event(NamedTuple):
    place: Place
    is_call: bool
    """Or a return; a generator that goes on is called, and returns at each `yield`."""


class Trace:
    """Functions of some folders that are entered and left, by thread, while `records` is set."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = tuple(f"{folder}/" for folder in folders)
        self.records = False
        self.events: defaultdict[int, list[Event]] = defaultdict(list)

    def start(self) -> None:
        """See this thread and those that Python starts from now on."""
        every = getattr(threading, "setprofile_all_threads", threading.setprofile)
        every(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.records or event not in ("call", "return"):
            return
        code = frame.f_code
        is_function = code.co_name == "<lambda>" or not code.co_name.startswith("<")
        if is_function and code.co_filename.startswith(self.folders):
            place = Place(code.co_filename, code.co_firstlineno, code.co_name)
            self.events[threading.get_ident()].append(Event(place, event == "call"))


def traced(name: str) -> list[list[Event]]:
    """On one rank: the events of each thread in the traced step."""
    way = WAYS[name]
    trace = Trace(way.folders)
    trace.start()
    torch.manual_seed(20)
    model = GPT(SPEC)
    model.head.weight = model.embedding.weight
    sharded: Any = way.shard(model)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    batch = SPEC.batch(torch.distributed.get_rank())
    for step in range(1, STEP + 1):
        optimizer.zero_grad()
        trace.records = step == STEP
        sharded(*batch).backward()
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        trace.records = False
    return list(trace.events.values())


class Row(NamedTuple):
    """What is counted of a way."""

    files: dict[str, list[Place]]
    """Functions on the way, by file."""
    switches: int
    and_back: int

    @classmethod
    def of(cls, threads: Iterable[list[Event]], left_out: Callable[[str], bool]) -> Row:
        files: defaultdict[str, set[Place]] = defaultdict(set)
        switches = and_back = 0
        for events in threads:
            kept = list(_outside(events, left_out))
            and_back += _changes(event.place.file for event in kept)
            switches += _changes(event.place.file for event in kept if event.is_call)
            for event in kept:
                files[event.place.file].add(event.place)
        return cls({file: sorted(files[file]) for file in sorted(files)}, switches, and_back)

    @property
    def functions(self) -> list[Place]:
        return [place for places in self.files.values() for place in places]

    @property
    def lines(self) -> int:
        return sum(map(lines_of, self.files))

    def __str__(self) -> str:
        length, longest = max((size_of(place)[1], place) for place in self.functions)
        where = f"{Path(longest.file).stem}.{size_of(longest)[0]}"
        counts = f"{len(self.files):>7}{len(self.functions):>11}{self.switches:>10}{self.and_back:>10}{self.lines:>8}"
        return f"{counts}{length:>9}  {where}"


def _outside(events: Iterable[Event], left_out: Callable[[str], bool]) -> Iterable[Event]:
    """Events of functions that are not in files to be left out, and were not called from there."""
    depth = 0
    for event in events:
        inside = depth > 0 or left_out(event.place.file)
        if inside:
            depth += 1 if event.is_call else -1
        else:
            yield event


def _changes(files: Iterable[str]) -> int:
    return sum(one != other for one, other in pairwise(files))


@cache
def lines_of(file: str) -> int:
    return len(Path(file).read_text().splitlines())


def size_of(place: Place) -> tuple[str, int]:
    """A function's full name in its file, and how many lines it has."""
    return functions_in(place.file).get((place.line, place.name), (place.name, 1))


@cache
def functions_in(file: str) -> dict[tuple[int, str], tuple[str, int]]:
    """Full name and number of lines of each function of a file, by first line and name."""
    found = {}

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        name = getattr(node, "name", "<lambda>")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            scope = (*scope, name)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            found[first, name] = ".".join(scope), (node.end_lineno or node.lineno) - node.lineno + 1
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(ast.parse(Path(file).read_text()), ())
    return found


def short(file: str) -> str:
    """From the package on."""
    roots = (OURS.parent, Path(torch.__file__).parent.parent)
    return next(str(Path(file).relative_to(root)) for root in roots if Path(file).is_relative_to(root))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the files, and the functions on the way in each")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"{'':22}{'files':>7}{'functions':>11}{'switches':>10}{'and back':>10}{'lines':>8}{'longest':>9}", flush=True)
    listed = []
    for name, way in WAYS.items():
        threads = on_ranks(2, traced, name)[0]
        for suffix, left_out in (("", way.leaves_out), (" + sharded tensors", lambda _: False)):
            row = Row.of(threads, left_out)
            print(f"{name + suffix:22}{row}", flush=True)
        listed.append((name, row))
    for name, row in listed if options.list else ():
        print(f"\n{name}")
        for file, places in row.files.items():
            mark = "  (sharded tensors)" if WAYS[name].leaves_out(file) else ""
            print(f"  {short(file)}: {lines_of(file)} lines, {len(places)} functions{mark}")
            for place in places:
                function, length = size_of(place)
                print(f"    {function}: {length}")


if __name__ == "__main__":
    main()
