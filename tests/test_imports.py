"""Imports inside the package point one way: between modules, and from each folder to those in ``MAY_IMPORT`` alone.

Counted are imports at the top of a module, under `TYPE_CHECKING` and inside functions alike: who reads a module has to
know what it names, whenever that is loaded. Names that the package looks up at first use (`yafsdp_cc.shard`) are those
that its `__init__` imports under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "profiling": "",
    "config": "",
    # Ranks, their groups, and what they check together.
    "ranks": "",
    "table": "",
    # The engine runs a step, on plain tensors in flat buffers.
    "engine": "profiling ranks",
    # Forms are kinds of weights, tensor is the class that users hold, sharding makes an engine of a module.
    "forms": "engine",
    "tensor": "ranks engine forms",
    "sharding": "ranks engine forms tensor",
    "fsdp2": "ranks engine forms tensor sharding",
    "plan": "table engine forms sharding",
    "compression": "profiling config ranks engine forms tensor fsdp2 plan",
    "optim": "ranks engine tensor sharding compression",
    # Each of these folders trains in another way than as one sharded model.
    "replicas": "ranks engine tensor fsdp2 compression optim",
    "server": "ranks compression",
    "batches": "ranks engine tensor fsdp2 compression replicas",
    "checkpoint": "ranks engine forms tensor fsdp2 compression optim replicas",
    "rescue": "ranks engine fsdp2 replicas checkpoint",
    # Users call these modules, and commands of tools.
    "api": "profiling config ranks engine forms tensor sharding fsdp2 plan compression replicas",
    "pipelining": "profiling engine fsdp2 compression",
    "tools": "profiling config table ranks engine sharding fsdp2 plan compression optim checkpoint rescue api",
    "integrations": "fsdp2 api pipelining tools",
    "__main__": "tools",
}
"""All folders and top-level modules of the package, each with the others that it imports, which stand above it."""

Graph = dict[str, set[str]]
"""The modules that each module imports, by full names."""


def import_graph(sources: Mapping[str, str]) -> Graph:
    """Find which of some modules import which others.

    Args:
        sources: source text by path from the folder that holds the package, such as "package/part/__init__.py".

    Returns:
        Every module, also one that imports nothing. `from package.part import name` is an edge to `package.part.name`
        if that is a module, else to `package.part`; a module's parent packages are no edges of their own.
    """
    names = {path: _module_name(path) for path in sources}
    modules = set(names.values())
    return {
        names[path]: {
            found
            for candidates in _imported(ast.parse(source), _package_of(path))
            for found in [next((each for each in candidates if each in modules), None)]
            if found is not None
        }
        for path, source in sources.items()
    }


def _module_name(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package_of(path: str) -> tuple[str, ...]:
    """The package that `from .` means in a module."""
    return PurePosixPath(path).parent.parts


def _imported(tree: ast.AST, package: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """For each imported name the modules that it may be or be in, the likelier one first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def shortest_cycle(graph: Graph) -> list[str]:
    """A cycle with as few modules as there can be, its first module once more at the end; [] if there is none."""
    cycles = [cycle for start in sorted(graph) if (cycle := _way_back(graph, start))]
    return min(cycles, key=len, default=[])


def _way_back(graph: Graph, start: str) -> list[str]:
    came_from: dict[str, str] = {}
    waiting = deque([start])
    while waiting:
        module = waiting.popleft()
        for each in sorted(graph[module]):
            if each == start:
                way = [start]
                while module != start:
                    way.append(module)
                    module = came_from[module]
                return [start, *reversed(way)]
            if each not in came_from:
                came_from[each] = module
                waiting.append(each)
    return []


def edges(graph: Graph, importer: str, imported: str) -> list[str]:
    """Imports by a module or anything in a package of another module or anything in another package."""
    return [
        f"{module} imports {each}"
        for module in sorted(graph)
        for each in sorted(graph[module])
        if f"{module}.".startswith(f"{importer}.") and f"{each}.".startswith(f"{imported}.")
    ]


def folders(graph: Graph) -> dict[str, set[str]]:
    """Which of the folders and modules at the top of a package each of them imports, itself left out."""
    found: dict[str, set[str]] = {}
    for module, imported in graph.items():
        tops = {each.split(".")[1] for each in imported if "." in each}
        if "." in module:
            top = module.split(".")[1]
            found.setdefault(top, set()).update(tops - {top})
    return found


def package() -> Graph:
    files = sorted((ROOT / "yafsdp_cc").rglob("*.py"))
    return import_graph({file.relative_to(ROOT).as_posix(): file.read_text() for file in files})


# The package


def test_no_module_imports_itself_by_way_of_others():
    cycle = shortest_cycle(package())
    assert not cycle, " imports ".join(cycle)


def test_folders_import_what_the_table_says():
    allowed, found = {name: each.split() for name, each in MAY_IMPORT.items()}, folders(package())
    assert found.keys() == allowed.keys()
    for name, each in found.items():
        assert each == set(allowed[name]), name


def test_the_package_needs_nothing_that_only_a_clone_has():
    for file in (ROOT / "yafsdp_cc").rglob("*.py"):
        imported = _imported(ast.parse(file.read_text()), _package_of(file.relative_to(ROOT).as_posix()))
        tops = {candidate.split(".")[0] for candidates in imported for candidate in candidates}
        assert not tops & {"bench", "tests"}, file


def test_the_table_has_no_circle():
    order = list(MAY_IMPORT)
    for place, imported in enumerate(MAY_IMPORT.values()):
        assert set(imported.split()) <= set(order[:place]), order[place]


def test_the_engine_hides_no_type_of_a_folder_above():
    hidden = [
        f"{file.name}:{node.lineno}: {ast.unparse(node)}"
        for file in sorted((ROOT / "yafsdp_cc" / "engine").glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Subscript)
        and ast.unparse(node.value).startswith("weakref.")
        and "Any" in ast.unparse(node)
    ]
    assert not hidden, "\n".join(hidden)


# What finds that


def test_every_way_to_import_is_counted():
    source = """
import os, p.a
import p.b as renamed
from p.c import name
from p import d
from . import e
from .f import g
from .. import h
from ..q import name
if TYPE_CHECKING:
    from p.i import Name
def late():
    import p.j
    class Inner:
        from p import k, l
"""
    empty = [f"p/{name}.py" for name in "abcdijk"] + ["p/s/e.py", "p/s/f/__init__.py", "p/s/f/g.py"]
    empty += ["p/__init__.py", "p/h.py", "p/q/__init__.py", "p/s/__init__.py", "p/unused.py"]
    graph = import_graph({"p/s/module.py": source, **dict.fromkeys(empty, "")})
    assert graph["p.s.module"] == {*(f"p.{name}" for name in "abcdhijkq"), "p", "p.s.e", "p.s.f.g"}
    assert graph["p.unused"] == set()


def test_a_package_imports_relative_to_itself():
    graph = import_graph({"p/s/__init__.py": "from .a import x\nfrom ..b import y", "p/s/a.py": "", "p/b.py": ""})
    assert graph["p.s"] == {"p.s.a", "p.b"}


def test_a_shortest_cycle_is_named():
    line = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert shortest_cycle(line) == []
    assert shortest_cycle({**line, "d": {"a"}}) == ["a", "b", "c", "d", "a"]
    assert shortest_cycle({**line, "d": {"a", "c"}}) == ["c", "d", "c"]
    assert shortest_cycle({**line, "c": {"c", "a"}}) == ["c", "c"]


def test_edges_between_packages_are_those_of_their_modules():
    graph = {"p.e": {"p.cc"}, "p.e.x": {"p.c.y", "p.e"}, "p.ee": {"p.c"}, "p.c": {"p.e"}, "p.e.z": {"p.c"}}
    assert edges(graph, "p.e", "p.c") == ["p.e.x imports p.c.y", "p.e.z imports p.c"]
