"""Nodes of this machine that are killed: each has a network namespace, and a memory, ``/dev/shm``, of its own.

python -m bench.faults --kills 200            ranks that are killed at random moments
python -m bench.faults --nodes-lost 50        nodes that lose their memory, too
python -m bench.faults --recovery 10          from a kill to the next finished step, beside checkpoints on a disk
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

from yafsdp_cc.tools.netlab import Lab, namespaces
from yafsdp_cc.tools.netlab.links import address

STEPS = 100
"""Steps of a run whose ranks or nodes are killed."""
_MEMORY = "mount --make-rprivate / && mount -t tmpfs -o size=2g tmpfs /dev/shm && echo ready && exec sleep infinity"


class Node:
    """One node: processes that share a network namespace and a memory."""

    def __init__(self, namespace: str, number: int) -> None:
        self._namespace, self._number = namespace, number
        self._holder = self._hold()

    def _hold(self) -> subprocess.Popen[str]:
        """Start the process that holds the node's memory, whoever else dies."""
        command = ["nsenter", f"--net={self._namespace}", "unshare", "--mount", "sh", "-c", _MEMORY]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError("a node's memory could not be mounted: this needs root")
        return holder

    def start(self, command: Sequence[str], folder: Path, output: IO[str], **environment: str) -> subprocess.Popen[str]:
        """Start a program on this node, in a folder that all nodes share."""
        inside = ["nsenter", f"--target={self._holder.pid}", "--mount", "--net", f"--wd={folder}", *command]
        return subprocess.Popen(
            inside,
            stdout=output,
            stderr=output,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "NODE": str(self._number), **environment},
        )

    def kill(self) -> None:
        """Kill all that runs on this node: its memory is lost. The node is then as one that was just switched on."""
        self._holder.kill()
        self._holder.wait()
        namespaces.sweep({namespaces.number(self._namespace)})
        self._holder = self._hold()

    def left(self) -> list[str]:
        """Return what is in the node's memory."""
        listed = subprocess.run(
            ["nsenter", f"--target={self._holder.pid}", "--mount", "find", "/dev/shm", "-mindepth", "1"],
            capture_output=True,
            text=True,
            check=True,
        )
        return listed.stdout.split()

    def close(self) -> None:
        """End what runs on this node."""
        self._holder.kill()
        self._holder.wait()


class Cluster:
    """Nodes, each with a network namespace and a memory of its own, for as long as a ``with`` lasts."""

    def __init__(self, nodes: int = 2, bandwidth: str = "unshaped") -> None:
        self._lab, self._count = Lab(nodes, bandwidth), nodes

    def __enter__(self) -> Cluster:
        self.lab = self._lab.__enter__()
        self.nodes = [Node(self.lab.links.machines[each], each) for each in range(self._count)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            with suppress(ProcessLookupError):
                node.close()
        self._lab.__exit__(kind, error, trace)

    def launch(
        self, node: int, script: Sequence[str], folder: Path, output: IO[str], flags: Sequence[str] = (), **env: str
    ) -> subprocess.Popen[str]:
        """Start the launcher of a node; launchers meet in a file, so that any of them may die."""
        command = [sys.executable, "-m", "yafsdp_cc", "launch", "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=run"]
        meeting = [f"--rdzv-endpoint={folder}/meeting"]
        here = [f"--local-addr={address(node)}", f"--log-dir={folder}/logs-{node}"]
        return self.nodes[node].start([*command, *meeting, *here, *flags, *script], folder, output, **env)


class Job:
    """One training run on all nodes of a cluster, whose launchers are started again when they die with their node."""

    def __init__(self, cluster: Cluster, folder: Path, flags: Sequence[str], **environment: str) -> None:
        self.cluster, self.folder, self._flags, self._environment = cluster, folder, flags, environment
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs = [(folder / f"node-{each}.txt").open("a") for each in range(len(cluster.nodes))]
        self.launchers = [self._start(each) for each in range(len(cluster.nodes))]

    def _start(self, node: int) -> subprocess.Popen[str]:
        job = ["-m", "bench.faults_job", str(self.folder)]
        return self.cluster.launch(
            node, job, self.folder, self._outputs[node], self._flags, PYTHONPATH=os.getcwd(), **self._environment
        )

    def steps(self) -> int:
        """Return the number of finished steps, as rank 0 has written it down."""
        return self._progress()[0]

    def process(self) -> int:
        """Return the process id of the rank 0 that has finished the last step."""
        return self._progress()[1]

    def _progress(self) -> tuple[int, int]:
        with suppress(OSError, ValueError):
            steps, process = (self.folder / "steps").read_text().split()
            return int(steps), int(process)
        return 0, 0

    def kill_a_rank(self, chance: random.Random) -> int:
        """Kill a random rank, by the process id that it has written down, and return 1; 0 if it does not run."""
        file = chance.choice(sorted(self.folder.glob("pid-*")) or [self.folder / "none"])
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)
            file.unlink()
            return 1
        return 0

    def kill_a_node(self, number: int) -> None:
        """Kill all processes of a node with their memory, and start its launcher again."""
        self.cluster.nodes[number].kill()
        self.launchers[number].wait()
        self.launchers[number] = self._start(number)

    def is_running(self) -> bool:
        """Return whether all launchers run."""
        return all(each.poll() is None for each in self.launchers)

    def wait(self, seconds: float) -> bool:
        """Return whether all launchers have ended well within so many seconds."""
        deadline = time.monotonic() + seconds
        while any(each.poll() is None for each in self.launchers):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return [each.returncode for each in self.launchers] == [0] * len(self.launchers)

    def result(self) -> str:
        """Return the digest of the weights in the end; "" where there is none."""
        file = self.folder / "digest"
        return file.read_text() if file.exists() else ""

    def told(self) -> str:
        """Return what the launchers have printed."""
        return "".join((self.folder / f"node-{each}.txt").read_text() for each in range(len(self.launchers)))

    def made_again(self) -> list[int]:
        """Return the number of steps that were made again after each start of the ranks behind the first."""
        told = re.findall(r"going on .*?(?:; steps (\d+) to (\d+) are made again)?\n", self.told())
        return [int(last) - int(first) + 1 if first else 0 for first, last in told]

    def close(self) -> None:
        """End the launchers."""
        for each in self.launchers:
            if each.poll() is None:
                each.kill()
            each.wait()
        for output in self._outputs:
            output.close()


def disturbed(count: int, per_run: int, lose_nodes: bool, folder: Path, seed: int) -> list[str]:
    """Run jobs until ``count`` ranks, or nodes, were killed; return what went wrong."""
    chance, wrong, killed = random.Random(seed), list[str](), 0
    again = Counter[int]()
    expected = ""
    for run in itertools.count():
        if killed >= count and expected:
            print("steps made again: times", dict(sorted(again.items())))
            return wrong
        with Cluster() as cluster:
            name = f"run-{run}" if expected else "undisturbed"
            job = Job(
                cluster,
                folder / name,
                ["--max-restarts=1000", "--start-method=fork"],
                STEPS=str(STEPS),
                SAVE_EVERY="20",
            )
            try:
                done = 0
                while expected and done < per_run and not job.result() and job.is_running():
                    begun = job.steps()  # of the last start: a loss may cost some of them
                    # two nodes have each other's copies once a snapshot was made after a loss
                    if lose_nodes and not _until(partial(_has_gone_on, job, begun), 120):
                        break
                    time.sleep(chance.uniform(0, chance.choice((1, 12))))  # soon after a start, or at any step
                    if lose_nodes:
                        if job.steps() > STEPS - 15:
                            break  # a node that is lost as the run ends has nobody left to go on with
                        job.kill_a_node(chance.randrange(len(cluster.nodes)))
                    done += 1 if lose_nodes else job.kill_a_rank(chance)
                killed += done
                ended = job.wait(300)
                left = [each for node in cluster.nodes for each in node.left()]
                if not ended or left or (expected and job.result() != expected):
                    wrong.append(f"{name}: ended {ended}, left {left}, digest {job.result()} of {expected}")
                expected = expected or job.result()
                again.update(job.made_again())
            finally:
                job.close()
        print(f"{name}: {killed} killed, {len(wrong)} wrong", flush=True)
    raise AssertionError


WAYS = {
    "checkpoints on the disk, new processes": (["--start-method=spawn"], {"MODE": "disk"}),
    "checkpoints on the disk, forked ranks": (["--start-method=fork"], {"MODE": "disk"}),
    "snapshots in memory, new processes": (["--start-method=spawn"], {}),
    "snapshots in memory, forked ranks": (["--start-method=fork"], {}),
}


def recovery(rounds: int, folder: Path, seed: int) -> dict[str, list[float]]:
    """Return the seconds from a kill of a random rank to the next finished step, of each way, in interleaved rounds."""
    chance, found = random.Random(seed), {way: list[float]() for way in WAYS}
    with Cluster() as cluster, ExitStack() as jobs:
        for run in range(rounds):
            for number, (way, (flags, environment)) in enumerate(WAYS.items()):
                name = f"recovery-{run}-{number}"
                job = Job(cluster, folder / name, ["--max-restarts=2", *flags], STEPS="100000", **environment)
                jobs.callback(job.close)
                _until(partial(_has_gone_on, job, 0), 120)
                time.sleep(chance.uniform(0, 1))
                begin, before = time.monotonic(), job.process()
                if job.kill_a_rank(chance):
                    _until(partial(_is_another, job, before), 120)
                    found[way].append(time.monotonic() - begin)
                job.close()
    return found


def _has_gone_on(job: Job, begun: int) -> bool:
    return job.steps() > begun + 12 or bool(job.result())


def _is_another(job: Job, process: int) -> bool:
    return job.process() not in (0, process)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``condition`` holds, or so many seconds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--nodes-lost", type=int, default=0)
    parser.add_argument("--recovery", type=int, default=0)
    parser.add_argument("--per-run", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    print(folder, flush=True)
    for count, lose_nodes in ((asked.kills, False), (asked.nodes_lost, True)):
        if count:
            kind = "nodes" if lose_nodes else "ranks"
            wrong = disturbed(count, asked.per_run, lose_nodes, folder / kind, asked.seed)
            print(f"{count} {kind} killed: {len(wrong)} runs went wrong", *wrong, sep="\n  ")
    for way, seconds in recovery(asked.recovery, folder, asked.seed).items() if asked.recovery else ():
        print(f"{way}: median {statistics.median(seconds):.2f} s of {', '.join(f'{each:.2f}' for each in seconds)}")


if __name__ == "__main__":
    main()
