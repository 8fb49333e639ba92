"""Slow networks on one machine: ranks in network namespaces, joined by links of a given rate, delay and loss.

Importing this package does not import torch, which starts threads: a rank has to enter its namespace before it has any.
"""

from yafsdp_cc.tools.netlab.lab import Lab
from yafsdp_cc.tools.netlab.links import LabError, Links, Traffic, Unavailable

__all__ = ["Lab", "LabError", "Links", "Traffic", "Unavailable"]
