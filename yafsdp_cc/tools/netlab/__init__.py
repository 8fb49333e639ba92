"""Slow networks on one machine: ranks in network namespaces, joined by links of a given rate, delay and loss.

Nothing here imports torch, which starts threads: a rank has to enter its namespace before there are any.
"""

from yafsdp_cc.tools.netlab.lab import Lab
from yafsdp_cc.tools.netlab.links import LabError, Links, Traffic, Unavailable

__all__ = ["Lab", "LabError", "Links", "Traffic", "Unavailable"]
