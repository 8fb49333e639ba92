"""The process that a lab lives by: it holds the namespaces, and whatever ends the lab, it leaves nothing behind.

It is forked by the lab, into a session of its own, and waits for the end of the lab or of the process that made it, by
whatever signal. Then it kills everything that is still in the lab's network namespaces, and with itself these are gone:
they never had names.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

from yafsdp_cc.netlab import build, namespaces
from yafsdp_cc.netlab.errors import LabError, Unavailable
from yafsdp_cc.netlab.links import Links
from yafsdp_cc.netlab.relay import Relay

START = 30.0
"""Seconds that it may take to make the namespaces."""


class Keeper:
    """The keeper as its lab sees it: the lab's links, and a folder that goes with the lab."""

    links: Links
    folder: str = ""

    def __init__(self, machines: int, near: int, delay_ms: float, loss: float) -> None:
        self.word, ours = Pipe()
        maker = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            self.word.close()
            _keep(maker, ours, machines, near, delay_ms, loss)
        ours.close()
        try:
            self.folder, descriptors = self._first_word()
            self.links = Links(self._process, descriptors)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise if it, or what it runs, has ended before its time: then ``word`` is readable."""
        if self.word.poll():
            try:
                raise LabError(self.word.recv())
            except (EOFError, ConnectionError):
                raise LabError("the process that keeps the lab was killed") from None

    def close(self) -> None:
        """End it and everything in the lab."""
        with suppress(ConnectionError):  # an end of file would not do: whoever was forked meanwhile holds the pipe too
            self.word.send(None)
        self.word.close()
        os.waitpid(self._process, 0)
        shutil.rmtree(self.folder, ignore_errors=True)  # should the keeper have been killed

    def _first_word(self) -> tuple[str, tuple[int, ...]]:
        if not self.word.poll(START):
            os.kill(self._process, signal.SIGKILL)
            raise Unavailable(f"making network namespaces took more than {START:.0f} s")
        try:
            word = self.word.recv()
        except (EOFError, ConnectionError):
            raise Unavailable("the process that makes the network namespaces was killed") from None
        if isinstance(word, Unavailable):
            raise word
        folder, *descriptors = word
        return folder, tuple(descriptors)


def _keep(maker: int, word: Connection, machines: int, near: int, delay_ms: float, loss: float) -> None:
    """The keeper's whole life, with ``near`` ranks on each machine; does not return."""
    try:
        os.setsid()
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        ends: list[Connection | int] = [word, os.pidfd_open(maker)]
        with tempfile.TemporaryDirectory(prefix="yafsdp-cc-") as folder:
            try:
                build.look_for_programs()
                held = build.namespaces_of(machines)
                try:
                    build.connect(held, bridge=not (delay_ms or loss), single=loss > 0)
                    relay = Relay(folder, machines, delay_ms, loss) if delay_ms or loss else None
                    word.send((folder, *(machine for machine in held for _ in range(near))))
                    _wait_for_the_end(ends, word, relay)
                finally:
                    namespaces.sweep({*map(namespaces.number, held), namespaces.number("/proc/self/ns/net")})
            except Unavailable as reason:
                word.send(reason)
    except (ProcessLookupError, ConnectionError):
        pass  # the maker ended at once
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _wait_for_the_end(ends: list[Connection | int], word: Connection, relay: Relay | None) -> None:
    if relay is None:
        wait(ends)
    elif relay.descriptor in wait([*ends, relay.descriptor]):
        word.send(f"the relay between the ranks ended with status {relay.status()}")
        wait(ends)
