"""The output of ranks: all of it in one log file per rank, and that of some ranks on the console, as it comes."""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

LOG = "YAFSDP_CC_LOG"
"""Environment variable with the path of a rank's log, for output that must not appear on the console."""


class UnwritableError(Exception):
    """A log cannot be written; the message names it and says what to do."""


class RankLogs(DefaultLogsSpecs):
    """Write the output of each rank to ``rank-N.log``, and that of some ranks to the console.

    Logs are appended to, after a line with the time and the attempt: neither a restart nor the next run overwrites
    them. Ranks write into pipes, which a thread of this process reads.

    Args:
        errors: a folder for the files in which ranks tell why they fail.
        shown: local ranks whose output also goes to the console; None: global rank 0.
    """

    def __init__(self, folder: Path, errors: str, shown: Collection[int] | None, title: str) -> None:
        super().__init__(log_dir=errors)
        self._folder, self._shown, self._title = folder, shown, title
        self._attempt = 0
        self._copies: _Copies | None = None
        self._begins: dict[int, int] = {}
        """Byte of the log at which this attempt's output begins, by rank, for ranks that are not on the console."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Open the logs for another attempt; torch's agent calls ``reify`` before it starts the ranks."""
        self.finish()
        destinations = super().reify(envs)
        self._attempt += 1
        self._copies, self._begins = _Copies(), {}
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            head = f"==== {when}, attempt {self._attempt}: rank {rank} of {env['WORLD_SIZE']}, {self._title}\n"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)  # a script may have removed the folder of logs
                log = os.open(self.path(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                _lock(log, self.path(rank))
                _write(log, os.fsencode(head))
            except OSError as error:
                why = f"{self.path(rank)} cannot be written, {error.strerror}: name another folder, --log-dir=DIR"
                raise UnwritableError(why) from error
            shown = rank == 0 if self._shown is None else local_rank in self._shown
            if not shown:
                self._begins[rank] = os.fstat(log).st_size
            destinations.stdouts[local_rank] = self._copies.add(log, 1 if shown else None)
            destinations.stderrs[local_rank] = self._copies.add(log, 2 if shown else None)
            env[LOG] = str(self.path(rank).absolute())
        self._copies.start()
        return destinations

    def finish(self) -> None:
        """Copy what ranks have left in their pipes, without waiting for children of ranks that hold the pipes open."""
        if self._copies is not None:
            self._copies.finish()
            self._copies = None

    def path(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self._folder / f"rank-{rank}.log"

    def append(self, rank: int, text: str) -> None:
        """Append ``text`` to the log of a rank that has ended."""
        with suppress(OSError), self.path(rank).open("ab") as file:  # ``_Copies`` has reported a full disk
            file.write(text.encode(errors="backslashreplace"))

    def last_lines(self, rank: int) -> list[str]:
        """Return the last lines that a rank has printed in this attempt; none for ranks on the console.

        A progress bar, which rewrites one line, appears in its last state; of long lines only the ends appear.
        """
        text = ""
        # ranks whose output is on the console are not in ``_begins``, and a script may have removed the folder of logs
        with suppress(KeyError, OSError), self.path(rank).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begins[rank], size - (1 << 16)))
            text = file.read().decode(errors="replace")
        lines = [line.rstrip("\r").rpartition("\r")[2][-400:] for line in text.split("\n")]
        return [line for line in lines if line][-12:]


class _Copies:
    """Copies what ranks write into pipes to files, in a thread and at once, so that progress bars look as usual."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._selector = selectors.DefaultSelector()
        self._logs: set[int] = set()
        self._ends: list[int] = []
        self._stop = self._pipe(None)

    def start(self) -> None:
        self._thread.start()

    def add(self, log: int, console: int | None) -> str:
        """Return the path of a new pipe, copied to ``log``, which ``finish`` closes, and to ``console`` unless None."""
        self._logs.add(log)
        return f"/proc/{os.getpid()}/fd/{self._pipe([log] if console is None else [console, log])}"

    def finish(self) -> None:
        """Copy the present content of the pipes; stop the thread, and close pipes and logs."""
        os.write(self._stop, b".")
        if self._thread.ident is not None:
            self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._selector.close()
            for file in (*self._ends, *self._logs):
                os.close(file)

    def _pipe(self, targets: list[int] | None) -> int:
        """Return the writing end of a new pipe, copied to the files ``targets``; if None, a write stops the thread."""
        source, end = os.pipe()
        self._selector.register(source, selectors.EVENT_READ, targets)
        self._ends += [source, end]
        return end

    def _run(self) -> None:
        stopping = False
        while (ready := self._selector.select(0 if stopping else None)) or not stopping:
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if key.data is None:
                    stopping = True
                    continue
                for file in list(key.data):
                    try:
                        _write(file, chunk)
                    except OSError as error:  # a full disk or closed console stops neither ranks nor other files
                        key.data.remove(file)
                        if file in self._logs:
                            path = os.readlink(f"/proc/self/fd/{file}")
                            print(f"yafsdp-cc: {path} ends here: {error.strerror}", file=sys.stderr)


def _lock(log: int, path: Path) -> None:
    """Lock a rank's log; warn if another launcher writes to the same log, and let the ranks run nevertheless."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        told = "the output of both runs is mixed there; give each a name, --name=NAME"
        print(f"yafsdp-cc: another run is writing {path}: {told}", file=sys.stderr)
    except OSError:
        pass  # the file system has no locks


def _write(file: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            select.select([], [file], [])
