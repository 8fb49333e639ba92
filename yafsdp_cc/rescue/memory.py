"""The folder of a run in the memory of one node, which outlives the run's processes.

/dev/shm/yafsdp_cc-<user>-<run>/    one for each name of a run
    <digest>/                       one for each run; the launchers of its nodes agree on the run's id
        lock                        locked as long as the launcher lives
        0/                          one for each ``Rescue``: the number of those that the program has closed before
            rank                    locked as long as the first rank of the node lives
            step-40.1f3a90c2/       files of a checkpoint; the letters are new after each start of the ranks
            steps-3                 number of steps that rank 3 has finished
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO

MEMORY = "YAFSDP_CC_MEMORY"
"""Environment variable by which the launcher gives ranks the folder of their run."""
_ROOT = Path("/dev/shm")


def folder_of_run(name: str, run_id: str) -> Path:
    """Return the folder of the run of this name and id, which may not exist."""
    name, digest = re.sub(r"[^\w.-]", "_", name), sha256(run_id.encode()).hexdigest()[:16]  # an id may have any length
    return _ROOT / f"yafsdp_cc-{os.getuid()}-{name}" / digest


def locked_by_rank(folder: Path) -> IO[bytes]:
    """Lock a folder of snapshots until this process ends, or the file that is returned is closed.

    Processes that this process forks have no part in the lock, so a fork that outlives it holds up no restart.

    Raises:
        ValueError: a rank of another run has locked it.
    """
    file = (folder / "rank").open("wb")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(
            f"{folder} has the snapshots of another run, which is going on: start each by yafsdp-cc launch, or by "
            f"torchrun --rdzv-id=NAME, or with a folder of its own, {MEMORY}=/dev/shm/NAME"
        ) from error
    return file


class RunMemory:
    """A launcher's hold on its run's folder. Removes ended runs' folders of this name, or without files of Rescue.

    Args:
        name: name of the run.
        run_id: id of the run; "" for one that no other launcher can take part in, and nobody can continue.
    """

    def __init__(self, name: str, run_id: str) -> None:
        self._is_alone = not run_id
        self._folder = folder_of_run(name, run_id or secrets.token_hex(8))
        self._lock: IO[bytes] | None = None
        self.was_left = self._folder.is_dir()
        """Whether the folder existed: another launcher of this run failed or was killed on this node, or is alive."""
        if not _ROOT.is_dir():
            return
        for folder in _ROOT.glob(f"yafsdp_cc-{os.getuid()}-*/*/"):
            is_of_name = folder.parent == self._folder.parent
            if folder != self._folder and (is_of_name or not any(folder.glob("*/step*"))):
                with suppress(OSError), (folder / "lock").open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the launcher of that run lives
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.parent.rmdir()
        os.environ[MEMORY] = str(self._folder)
        with suppress(OSError):  # the memory may be full: then the first snapshot raises an error
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # two launchers of a run may share a machine

    def close(self, status: int) -> None:
        """Unlock the folder; remove it if the run ended with ``status`` 0, or no launcher can continue the run."""
        if self._lock is None:
            return
        if status == 0 or self._is_alone:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()
        with suppress(OSError):
            self._folder.parent.rmdir()
