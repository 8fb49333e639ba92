"""The links of a running lab, for its ranks and for others: their rates, and the bytes that they carried."""

from __future__ import annotations

import os
import subprocess
from typing import NamedTuple

from yafsdp_cc.netlab import namespaces, traffic
from yafsdp_cc.netlab.errors import LabError, Unavailable
from yafsdp_cc.netlab.interfaces import DEVICE, port
from yafsdp_cc.netlab.rate import Rate

VARIABLE = "YAFSDP_CC_NETLAB"


class Links(NamedTuple):
    """The process that keeps the lab, and its descriptors of the ranks' network namespaces; near ranks share one."""

    keeper: int
    descriptors: tuple[int, ...]

    @classmethod
    def here(cls) -> Links:
        """Of the lab in which this process is a rank."""
        if VARIABLE not in os.environ:
            raise LabError(f"not in a lab: {VARIABLE} is not set; run this program by bench/netlab.py or Lab.launch")
        keeper, *descriptors = map(int, os.environ[VARIABLE].split(","))
        return cls(keeper, tuple(descriptors))

    def as_variable(self) -> str:
        return ",".join(map(str, (self.keeper, *self.descriptors)))

    @property
    def machines(self) -> list[int]:
        """The descriptors, each once: what has a link."""
        return list(dict.fromkeys(self.descriptors))

    @property
    def user(self) -> str:
        """The user namespace to which all of them belong."""
        return f"/proc/{self.keeper}/ns/user"

    @property
    def hub(self) -> str:
        return f"/proc/{self.keeper}/ns/net"

    def rank(self, rank: int) -> str:
        return f"/proc/{self.keeper}/fd/{self.descriptors[rank]}"

    def traffic(self) -> list[traffic.Traffic]:
        """What every machine sent and received since the lab began, at one moment."""
        return traffic.read(f"/proc/{self.keeper}/net/dev", len(self.machines))

    def set_bandwidth(self, bandwidth: str) -> None:
        """Shape every machine's link, both ways, from now on. One rank does it for all; no connection notices."""
        rate = Rate.parse(bandwidth)
        self._shape(self.hub, [rate.shaping(port(machine)) for machine in range(len(self.machines))])
        for machine in self.machines:
            self._shape(self.rank(self.descriptors.index(machine)), [rate.shaping(DEVICE)])

    def inside(self, where: str) -> list[str]:
        """The beginning of a command that is to run in a network namespace of the lab."""
        is_ours = os.path.samefile(self.user, "/proc/self/ns/user")
        user = [] if is_ours else ["--preserve-credentials", f"--user={self.user}"]
        return ["nsenter", *user, f"--net={where}", "--"]

    def numbers(self) -> set[int]:
        """Of the ranks' network namespaces."""
        return {namespaces.number(self.rank(rank)) for rank in range(len(self.descriptors))}

    def _shape(self, where: str, lines: list[str]) -> None:
        done = subprocess.run(
            [*self.inside(where), "tc", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise Unavailable(
                f"tc refused {lines[0]!r}: {done.stderr.strip()}; the kernel needs tbf (CONFIG_NET_SCH_TBF)"
            )
