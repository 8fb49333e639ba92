"""What the trace of a step counts, on made-up events and sources."""

from __future__ import annotations

from pathlib import Path

from bench.step_trace import Event, Place, Row, functions_in

SOURCE = """\
class Shard:
    @property
    def size(self):
        return [each for each in self]

    def outer(self):
        def inner():
            pass

        return lambda: (
            inner
        )
"""


def events(text: str) -> list[Event]:
    """Calls as capitals and returns as small letters, of one function in a file of that name each."""
    return [Event(Place(each.upper(), 1, "run"), each.isupper()) for each in text]


def test_switches_are_counted_thread_by_thread():
    row = Row.of([events("ABbCca"), events("B")], lambda _: False)
    assert list(row.files) == ["A", "B", "C"]
    assert len(row.functions) == 3
    assert (row.switches, row.and_back) == (2, 3)


def test_what_is_left_out_is_no_switch():
    row = Row.of([events("ABbAaCca")], lambda file: file == "B")
    assert list(row.files) == ["A", "C"]
    assert (row.switches, row.and_back) == (1, 2)


def test_functions_are_found_by_where_their_decorators_begin(tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    assert functions_in(str(file)) == {
        (2, "size"): ("Shard.size", 2),
        (6, "outer"): ("Shard.outer", 7),
        (7, "inner"): ("Shard.outer.inner", 2),
        (10, "<lambda>"): ("Shard.outer.<lambda>", 3),
    }
