"""Slow networks on one machine: ranks in network namespaces, joined by links of a given rate, delay and loss."""

from yafsdp_cc.tools.netlab.lab import Lab
from yafsdp_cc.tools.netlab.links import LabError, Links, Traffic, Unavailable

__all__ = ["Lab", "LabError", "Links", "Traffic", "Unavailable"]
