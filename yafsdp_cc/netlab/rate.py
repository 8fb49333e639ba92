"""How many bits a second a rank's link carries each way, and the arguments of ``tc`` for it."""

from __future__ import annotations

import re
from typing import NamedTuple

UNSHAPED = "unshaped"
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
FRAME = 66_000
"""Bytes of the largest frame, its headers in each packet counted."""
QUEUE = "50ms"
"""What may wait at a link, by the time that it takes to send it; what comes then is dropped, as by a switch."""


class Rate(NamedTuple):
    """Bits per second, headers included; 0 where the machine is the only limit."""

    bits: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Of ``100mbit``, ``2.5gbit`` or ``unshaped``."""
        if text == UNSHAPED:
            return cls(0)
        matched = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})", text)
        bits = round(float(matched[1]) * UNITS[matched[2]]) if matched else 0
        if bits < UNITS["kbit"]:
            raise ValueError(f"bandwidth {text!r}: write 100mbit, 2.5gbit, 500kbit or {UNSHAPED}")
        return cls(bits)

    def shaping(self, device: str) -> str:
        """The line for ``tc -batch`` by which the device sends at this rate from now on."""
        if self.bits == 0:
            return f"qdisc replace dev {device} root pfifo"
        # A bucket of two milliseconds outlives a late timer. One that holds the largest frame leaves it uncut, and the
        # processors to the ranks, as network cards do; below 100 mbit so large a bucket would be no limit for too long.
        burst = max(FRAME if self.bits >= 100 * UNITS["mbit"] else 16_000, self.bits // 8 // 500)
        return f"qdisc replace dev {device} root tbf rate {self.bits}bit burst {burst} latency {QUEUE}"
