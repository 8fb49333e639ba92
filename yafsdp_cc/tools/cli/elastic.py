"""Runs the ranks of a node with torchrun's own agent: rendezvous of launchers, restarts, and reports of failures.

When ranks fail, the report ends with the rank that failed first, its last lines and its whole traceback. Ctrl-C ends
every rank, in silence; after a second Ctrl-C the launcher kills the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api as launcher_api
from torch.distributed.launcher.api import LaunchConfig

from yafsdp_cc.ranks.checks import named_ranks
from yafsdp_cc.rescue.memory import RunMemory
from yafsdp_cc.tools.cli.logs import RankLogs, UnwritableError
from yafsdp_cc.tools.cli.runner import NOTICES

T = TypeVar("T")
ALONE = "localhost:0"
"""Rendezvous endpoint of a run on this machine alone."""
_PATIENCE = 3
"""Seconds that ranks have to end after Ctrl-C before the launcher says that it waits for them."""


def run(options: argparse.Namespace, parser: argparse.ArgumentParser, folder: Path, title: str) -> int:
    """Run the ranks of this node with torchrun's ``options``, with logs in ``folder``; return the exit status."""
    # set the path of flight-recorder files: NCCL's process groups write them after a time-out, for gloo's the runner
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    by_older_name = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{folder.absolute()}/flight-recorder-rank-")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", by_older_name)
    by_torch = options.logs_specs or (options.redirects, options.tee) != ("0", "0")
    with tempfile.TemporaryDirectory(prefix="yafsdp-cc-") as errors:
        options.log_dir = str(folder) if by_torch else errors
        config, launch = _torch_config(options, parser)
        logs = None
        if not by_torch:
            chosen = options.local_ranks_filter
            shown = {int(rank) for rank in chosen.split(",")} if chosen else None
            config.logs_specs = logs = RankLogs(folder, errors, shown, title)
        place = config.rdzv_endpoint
        # every run without --rdzv-id has torch's default id, "none": on one node no other launcher continues such a run
        is_alone = place == ALONE or (config.max_nodes == 1 and config.run_id == "none")
        memory, status = RunMemory(options.name, "" if is_alone else f"{config.run_id}-{place}"), 1
        job = _Job(folder, logs, "" if config.max_nodes == 1 else " on this node", memory.was_left, [])
        try:
            status = _launch(job, launch, parser)
            return status
        except SignalException as stopped:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C while the launcher ends
            return 128 + stopped.sigval
        finally:
            memory.close(status)
            if logs is not None:
                logs.finish()


@dataclass
class _Job:
    """Paths, logs and times of the job, which a report of failed ranks needs."""

    folder: Path
    logs: RankLogs | None
    where: str
    is_again: bool
    """Whether a launcher that ran earlier on this node took part in the same run."""
    left: list[int]
    """Ranks of this node that had ended with status 0 when torch's agent last looked."""
    began: float = 0.0
    """Time at which the ranks of the present attempt were started."""


def _torch_config(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[LaunchConfig, Callable[[], object]]:
    """Return torch's ``LaunchConfig`` of the options, and the function that runs the ranks with this config."""
    if options.standalone or (
        options.rdzv_backend == "static"
        and options.nnodes in ("1", "1:1")
        and (options.rdzv_endpoint, options.master_port) == ("", None)
    ):
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", ALONE, str(uuid.uuid4())
    options.master_port = options.master_port or 29500
    is_file = "/" in options.rdzv_endpoint
    if is_file:  # launchers meet in a file, not in a TCPStore, which would die with its node
        options.rdzv_backend, options.rdzv_conf = "c10d", f"{options.rdzv_conf},store_type=file".lstrip(",")
    try:
        config, command, arguments = torchrun.config_from_args(options)
        config.rdzv_configs["is_here"] = config.max_nodes == 1 and not is_file and _is_here(config.rdzv_endpoint)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if config.rdzv_configs["is_here"]:
        config.local_addr = config.local_addr or "localhost"
    rendezvous_handler_registry.register(FreshStores.BACKEND, FreshStores)
    config.rdzv_configs["meets_by"], config.rdzv_backend = config.rdzv_backend, FreshStores.BACKEND
    handled = [name for name in map(str.strip, config.signals_to_handle.split(",")) if name != "SIGINT"]
    # leave out ignored signals, as SIGHUP under nohup: torch's agent would end the ranks when the terminal closes
    config.signals_to_handle = ",".join(
        name for name in handled if signal.getsignal(getattr(signal, name, signal.SIGTERM)) != signal.SIG_IGN
    )
    return config, partial(launcher_api.elastic_launch(config, command), *arguments)


def _is_here(endpoint: str) -> bool:
    """Return whether an endpoint is a loopback address, which no other machine reaches."""
    host, _ = parse_rendezvous_endpoint(endpoint, 0)
    with suppress(OSError):
        return all(ip_address(each[4][0]).is_loopback for each in socket.getaddrinfo(host, 0))
    return False


def _launch(job: _Job, launch: Callable[[], object], parser: argparse.ArgumentParser) -> int:
    class Agent(LocalElasticAgent):
        """torch's agent, which passes the signals ``NOTICES`` on to ranks, and reports failures before each restart."""

        def run(self, role: str = DEFAULT_ROLE) -> RunResult:
            for each in NOTICES:
                if signal.getsignal(each) is signal.SIG_DFL:
                    signal.signal(each, starts.handler(self._pass_on))
            result: RunResult = super().run(role)
            meeting = self._worker_group.spec.rdzv_handler
            if isinstance(meeting, FreshStores) and not result.is_failed():
                meeting.set_ended()
            return result

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            job.began = time.time()
            with starts:
                started: dict[int, Any] = super()._start_workers(worker_group)
            return started

        def _pass_on(self, number: int, frame: FrameType | None) -> None:
            """Send the ranks a signal that without this handler would end the launcher.

            ``frame`` is None if the signal was put off: ranks that have just started, without a handler, would die.
            """
            for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
                with suppress(ProcessLookupError):
                    if frame is not None or _catches(pid, number):
                        os.kill(pid, number)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if isinstance(self._pcontext, SubprocessContext):  # note which ended before torch's agent ends the others
                handlers = self._pcontext.subprocess_handlers.items()
                job.left[:] = [worker_group.workers[i].global_rank for i, each in handlers if each.proc.poll() == 0]
            result: RunResult = super()._monitor_workers(worker_group)
            if job.logs is not None and result.state != WorkerState.HEALTHY:
                job.logs.finish()
            if result.is_failed() and self._remaining_restarts > 0:
                _report(job, result.failures)
            return result

    starts = _Starts()
    signal.signal(signal.SIGINT, _stop_ranks)
    try:
        # torch takes the class of its agent, and its handler of signals, from these attributes: no arguments give them
        setattr(launcher_api, "LocalElasticAgent", Agent)  # noqa: B010  (mypy forbids the assignment)
        setattr(api, "_terminate_process_handler", starts.handler(api._terminate_process_handler))  # noqa: B010
        launch()
    except ChildFailedError as failed:
        return _report(job, failed.failures)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except (RendezvousError, DistError, UnwritableError, _EndedError) as error:
        print(f"yafsdp-cc: {_first_line(error)}", file=sys.stderr)
        return 0 if isinstance(error, _EndedError) and job.is_again else 1
    return 0


class _Starts:
    """A context in which torch's agent starts ranks: until its start returns, the agent cannot signal or end them.

    A signal that comes meanwhile would be lost, or would end the launcher, and with it forked ranks.
    """

    def __init__(self) -> None:
        self._put_off: list[Callable[[], object]] | None = None

    def handler(self, handle: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], object]:
        """Return ``handle`` as a handler of signals, which is called with None as its frame once ranks have started."""

        def handle_later(number: int, frame: FrameType | None) -> None:
            if self._put_off is None:
                handle(number, frame)
            else:
                self._put_off.append(partial(handle, number, None))

        return handle_later

    def __enter__(self) -> None:
        self._put_off = []

    def __exit__(self, *_: object) -> None:
        put_off, self._put_off = self._put_off, None
        for each in put_off or ():
            each()


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def _stop_ranks(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Handle the first Ctrl-C: torch's agent interrupts the ranks and waits up to 30 seconds for their end."""
    signal.signal(signal.SIGINT, _kill_ranks)
    waits = threading.Timer(_PATIENCE, os.write, (2, b"yafsdp-cc: waiting for the ranks to end; Ctrl-C kills them\n"))
    waits.daemon = True
    waits.start()
    raise SignalException("interrupted", signal.SIGINT)


def _kill_ranks(_signal: int, _frame: FrameType | None) -> None:
    """Handle a second Ctrl-C: kill the ranks, for which torch's agent waits; it then ends as after the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    for pid in children:
        # try killpg first: it also ends the children of a rank that leads its own process group
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    os.write(2, b"yafsdp-cc: interrupted again: killed the ranks that had not ended\n" if children else b"")


class _EndedError(Exception):
    """Error of a launcher that joins a run which the other launchers have already ended with success."""


class _OwnClock(C10dRendezvousBackend):
    """A c10d rendezvous backend that dates each node's heartbeat by when this node, by its own clock, saw it change.

    torch takes a node for dead by comparing that node's wall clock with this one's: wall clocks differ, and jump.

    Args:
        interval: seconds between two heartbeats of a launcher.
    """

    def __init__(self, store: Store, run_id: str, interval: int) -> None:
        super().__init__(store, run_id)
        self._beats: dict[object, tuple[datetime, float]] = {}
        """Each node's last heartbeat as that node wrote it, and when this node saw it change, by ``time.monotonic``."""
        self._shown: dict[object, datetime] = {}
        if found := super().get_state():
            # heartbeats found at first may be of dead nodes: take their age as written; living nodes soon write others
            for node, beat in pickle.loads(found[0]).last_heartbeats.items():
                age = datetime.now(timezone.utc) - beat
                self._beats[node] = beat, time.monotonic() - max(0.0, age.total_seconds())
            time.sleep(2 * interval)

    def get_state(self) -> tuple[bytes, Any] | None:
        found = super().get_state()
        return found and (self._as_shown(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        written = pickle.loads(state)
        for node, beat in written.last_heartbeats.items():
            if beat == self._shown.get(node):
                written.last_heartbeats[node] = self._beats[node][0]
        found = super().set_state(pickle.dumps(written), token)
        return found and (self._as_shown(found[0]), *found[1:])

    def _as_shown(self, state: bytes) -> bytes:
        shown, now = pickle.loads(state), time.monotonic()
        for node, beat in shown.last_heartbeats.items():
            if node not in self._beats or self._beats[node][0] != beat:
                self._beats[node] = beat, now
            shown.last_heartbeats[node] = datetime.now(timezone.utc) - timedelta(seconds=now - self._beats[node][1])
        self._shown = shown.last_heartbeats
        return pickle.dumps(shown)


class FreshStores(RendezvousHandler):
    """A rendezvous by one of torch's backends that gives the ranks of each attempt an empty store.

    ``init_process_group`` reads the addresses of its peers under the same keys in every attempt, and torch's backends
    use one store for all attempts: a restarted rank would find addresses of ranks that are gone.

    Args:
        params: torchrun's ``--rdzv-...`` options; ``meets_by`` in ``params.config`` names torch's backend.
    """

    BACKEND = "yafsdp_cc"

    def __init__(self, params: RendezvousParameters) -> None:
        backend, nodes = params.config.pop("meets_by"), (params.min_nodes, params.max_nodes)
        params.config.setdefault("keep_alive_interval", 1)  # notice a dead launcher after 5 s, not 15 s
        params.config.setdefault("keep_alive_max_attempt", 5)
        is_here = params.config.pop("is_here") and backend in ("static", "c10d")
        # copy ``params``: torch afterwards compares the backend that they name with this handler's
        inner = RendezvousParameters(
            backend, params.endpoint, params.run_id, *nodes, params.local_addr, **params.config
        )
        # With torch's own shared store, a node that joins in a later round would wait for an address that nobody sends.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._is_static = backend == "static" and not is_here
        self._has_address = params.local_addr is not None
        self._place, self._least = params.endpoint, params.min_nodes
        self._attempt = 0
        self._server: TCPStore | None = None
        """Store of the ranks, if this node serves it; its port is the user's in static's first attempt, else free."""
        self._store: Store | None = None
        """Store in which launchers meet, if torch's c10d backend or this class has made one."""
        self._ended = f"yafsdp_cc/ended/{inner.run_id}"
        try:
            seconds = 2 * (inner.get_as_int("read_timeout") or 60)  # torch waits for ``read_timeout`` seconds twice
            if is_here:
                _, port = parse_rendezvous_endpoint(params.endpoint, 29400)
                if backend == "static":
                    self._server, port = self._meet(lambda: _listening_store("localhost", port)), 0
                if inner.get("store_type", "tcp") == "tcp":
                    # listen on localhost only, unlike torch's own store, as launchers unpickle what is in a store
                    with suppress(OSError):  # the port is taken: let torch join another run's store there
                        self._store = _listening_store("localhost", port)
            if self._store is None and backend == "c10d":
                _, self._store = self._meet(lambda: create_backend(inner), seconds)
            if self._store is None:
                self._inner = self._meet(lambda: rendezvous_handler_registry.create_handler(inner), seconds)
            else:
                interval = inner.get_as_int("keep_alive_interval") or 1
                meeting = self._meet(partial(_OwnClock, self._store, inner.run_id, interval))
                self._inner = create_handler(self._store, meeting, inner)
        except (ValueError, ImportError) as error:
            raise argparse.ArgumentError(None, f"--rdzv-backend, --rdzv-endpoint or --rdzv-conf: {error}") from error

    def _meet(self, others: Callable[[], T], seconds: int | None = None) -> T:
        """Call ``others``, which waits for other launchers; return its result, or raise a one-line ``RendezvousError``.

        ``others`` runs in a thread: torch waits for other nodes a quarter of an hour and ignores Ctrl-C meanwhile, and
        if a program that is no store listens at the endpoint, torch's time-out has no effect.
        """
        met: Future[T] = Future()

        def run() -> None:
            try:
                met.set_result(others())
            except Exception as error:
                met.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        try:
            return met.result(seconds)
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise RendezvousError("the launcher of another node has given up: see its output") from error
        except FutureTimeoutError as error:
            reason = f"what listens there has not answered in {seconds} s; is it another program?"
            raise RendezvousError(f"{self._place}: {reason}") from error
        except (RendezvousError, DistError, OSError) as error:
            reason = _first_line(error.__cause__ or error)
            if "address already in use" in reason.lower():  # torch and Python differ in upper and lower case
                reason = "another program listens on this port; name another, or none if this is the only node"
                raise RendezvousError(f"{self._place}: {reason}") from error
            raise RendezvousError(f"not all launchers have met at {self._place}: {reason}") from error

    def next_rendezvous(self) -> RendezvousInfo:
        attempt, self._attempt = self._attempt, self._attempt + 1
        info = self._meet(lambda: self._next(attempt))
        if attempt:
            print(f"yafsdp-cc: starting the ranks again ({attempt})", file=sys.stderr)
        return info

    def _next(self, attempt: int) -> RendezvousInfo:
        try:
            info = self._inner.next_rendezvous()
            while info.world_size < self._least:  # torch has removed a node that hangs
                print("yafsdp-cc: a node was lost while launchers met: meeting again", file=sys.stderr)
                info = self._inner.next_rendezvous()
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            if attempt or self._store is None or not self._store.check([self._ended]):
                raise
            text = f"the run {self.get_run_id()} that meets at {self._place} has ended: another one needs a new place"
            raise _EndedError(text) from error
        place = info.bootstrap_store_info
        # Return torch's ``info`` as is if it has no address for the ranks to meet at, and in the first attempt of the
        # static backend, in which they meet at the address that the user gave.
        if place is None or (self._is_static and not attempt):
            return info
        # number attempts for static alone: other backends have a prefix for each round, and late nodes count fewer
        store = PrefixStore(f"yafsdp_cc/{attempt if self._is_static else 'ranks'}", info.store)
        port = None
        if info.rank == 0:
            if self._server is None or attempt:
                self._server = _listening_store(place.master_addr, everywhere=not self._has_address)
            port = self._server.port
        place = RendezvousStoreInfo.build(info.rank, store, place.master_addr, port)
        return RendezvousInfo(store, info.rank, info.world_size, place)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self.BACKEND

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def set_ended(self) -> None:
        """Tell launchers that come later that this run has ended with success; ``set_closed`` tells of any end."""
        if self._store is not None:
            with suppress(RuntimeError):  # the node that served the store has already ended
                self._store.set(self._ended, "")

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def _listening_store(address: str, port: int = 0, *, everywhere: bool = False) -> TCPStore:
    """Return a store that listens on ``address`` alone, or ``everywhere`` on all interfaces; ``port`` 0: a free one."""
    if everywhere:
        return TCPStore(address, 0, is_master=True, wait_for_workers=False)
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


class Failure(NamedTuple):
    """Failure of a rank. Killed ranks, and those without our runner, write no error file: ``time_ns`` is 0 then, and
    ``traceback`` empty."""

    time_ns: int
    rank: int
    exit_code: int
    summary: str
    traceback: str


def _report(job: _Job, failures: Mapping[int, ProcessFailure]) -> int:
    """Print how ranks failed, by global rank, the first failing one's traceback last; return the exit status."""
    first, *later = _in_order(failures)
    lines = job.logs.last_lines(first.rank) if job.logs is not None else []
    for failure in (first, *later):
        if job.logs is not None and failure.traceback:
            job.logs.append(failure.rank, failure.traceback)
    for failure in later:
        print(f"yafsdp-cc: rank {failure.rank} failed after it: {failure.summary}", file=sys.stderr)
    print(f"yafsdp-cc: the output of every rank is in {job.folder}", file=sys.stderr)
    prefix = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"])
    # older flight-recorder files are of earlier attempts
    if any(file.stat().st_mtime >= job.began for file in prefix.parent.glob(f"{prefix.name}*")):
        print(
            "yafsdp-cc: a collective timed out; logs end with where each rank was. pip install tabulate, and see "
            f"their last collectives: torchfrtrace {prefix.parent} --prefix {prefix.name} --allow-incomplete-ranks -j",
            file=sys.stderr,
        )
    if lines:
        print(f"yafsdp-cc: the last lines of rank {first.rank}:", *lines, sep="\n  ", file=sys.stderr)
    if job.left:
        print(f"yafsdp-cc: {named_ranks(job.left)} had ended with status 0", file=sys.stderr)
    print(f"yafsdp-cc: rank {first.rank} failed first{job.where}: {first.summary}", file=sys.stderr)
    if first.traceback:
        print(f"\n{first.traceback}", file=sys.stderr)
    return first.exit_code if first.exit_code > 0 else 128 - first.exit_code


def _in_order(failures: Mapping[int, ProcessFailure]) -> list[Failure]:
    """Return this node's failures, the first cause first. (torch compares whole seconds, and drops the reasons.)"""
    written = [Path(failure.error_file) for failure in failures.values() if failure.error_file not in ("", "<N/A>")]
    wrote = []
    for file in {file for path in written for file in path.parent.parent.glob("*/error.json")}:  # errors of all ranks
        message = json.loads(file.read_text())["message"]
        extra = message["extraInfo"] if isinstance(message, dict) else {}
        if "time_ns" in extra:
            summary = message["message"].partition("\n")[0][:400]
            story = extra["py_callstack"]
            wrote.append(Failure(int(extra["time_ns"]), extra["rank"], extra["exit_code"], summary, story))
    known = {failure.rank for failure in wrote}
    silent = []
    for rank, failure in failures.items():
        if rank not in known:
            code = failure.exitcode
            memory = " (the system may be out of memory)" if code == -signal.SIGKILL else ""
            summary = f"exit status {code}" if code >= 0 else f"killed by signal {-code}{memory}"
            silent.append(Failure(0, rank, code, summary, ""))
    # A killed rank writes no error file, and other ranks fail as they lose their connection to it, so it comes first. A
    # rank killed by SIGTERM does not: the launcher itself ends the remaining ranks by SIGTERM.
    killed = [failure for failure in silent if failure.exit_code < 0 and failure.exit_code != -signal.SIGTERM]
    left = [failure for failure in silent if failure.exit_code > 0]
    wrote.sort()
    if wrote and re.search("(closed|reset) by peer", wrote[0].traceback):  # a rank exited without an error
        return [*killed, *left, *wrote]
    return [*killed, *wrote, *left] or silent
