"""Ranks of this machine joined by a slow network, for as long as a ``with`` lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yafsdp_cc.netlab import namespaces
from yafsdp_cc.netlab.interfaces import MOST_RANKS
from yafsdp_cc.netlab.keeper import Keeper
from yafsdp_cc.netlab.programs import Programs
from yafsdp_cc.netlab.ranks import Ranks
from yafsdp_cc.netlab.rate import UNSHAPED, Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yafsdp_cc.netlab.traffic import Traffic


class Lab:
    """Network namespaces, one per rank, joined by links of a given rate, delay and loss.

    ``bandwidth`` is what each rank can send, and receive, per second, headers included: ``100mbit``, ``2.5gbit`` or
    ``unshaped``. ``delay_ms`` is one way: an answer takes twice that. ``loss`` is the fraction of packets that vanish.
    Every ``near`` ranks share a namespace, as those of one machine do: they have one link to all others, and none
    between each other.

    The namespaces exist inside the ``with``, and nothing of them, nor any process in them, after it or after the death
    of the process that made it. Raises ``Unavailable`` where the machine cannot have them.
    """

    def __init__(
        self, ranks: int = 2, bandwidth: str = UNSHAPED, delay_ms: float = 0.0, loss: float = 0.0, near: int = 1
    ) -> None:
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"ranks={ranks}: a lab has 1 to {MOST_RANKS}")
        if not 1 <= near <= ranks or ranks % near:
            raise ValueError(f"near={near}: ranks on each machine, of {ranks} in all")
        if not 0 <= delay_ms <= 10_000:
            raise ValueError(f"delay_ms={delay_ms}: 0 to 10000 milliseconds, one way")
        if not 0 <= loss < 1:
            raise ValueError(f"loss={loss}: a fraction of packets, 0.001 for one in a thousand")
        Rate.parse(bandwidth)
        self._options = (ranks // near, near, delay_ms, loss)
        self._bandwidth = bandwidth

    def __enter__(self) -> Lab:
        self._keeper = Keeper(*self._options)
        try:
            self.links = self._keeper.links
            self._numbers = self.links.numbers()
            self.links.set_bandwidth(self._bandwidth)
            self._begin()
        except BaseException:
            self._keeper.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.close()

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Run ``body(*args)`` on forked ranks in one gloo group, seeded alike; its picklable results, in rank order.

        The caller has imported torch and computed nothing: threads do not survive a fork. The first rank that raises
        ends the others, and ``LabError`` holds its traceback; so does a hang, after ``timeout`` seconds.
        """
        self._begin()
        results: list[Any] = self._run(Ranks(self._keeper, timeout, body, args))
        return results

    def launch(self, command: Sequence[str], timeout: float = 3600.0) -> None:
        """Run a command as every rank, with torchrun's variables set; ``LabError`` if one fails or hangs."""
        self._begin()
        self._run(Programs(self._keeper, timeout, command))

    def set_bandwidth(self, bandwidth: str) -> None:
        """Change the rate of every link, of running ranks too, also by one of the ranks themselves."""
        self.links.set_bandwidth(bandwidth)

    def traffic(self) -> list[Traffic]:
        """What every machine sent and received since the lab began. Inside a body, too: before and after a phase."""
        return self.links.traffic()

    def bytes(self) -> list[Traffic]:
        """What every machine sent and received in the last run, or so far in the one under way."""
        until = self._ended or self.traffic()
        return [now.since(then) for now, then in zip(until, self._started, strict=True)]

    def _begin(self) -> None:
        self._started: list[Traffic] = self.traffic()
        self._ended: list[Traffic] | None = None

    def _run(self, running: Ranks | Programs) -> Any:
        try:
            result = running.finish()
            self._ended = self.traffic()
            return result
        finally:
            running.end()
            namespaces.sweep(self._numbers)  # and what they have started
