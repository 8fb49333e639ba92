"""Slow networks on one machine: ranks in network namespaces, joined by links of a given rate, delay and loss."""

from yafsdp_cc.netlab.errors import LabError, Unavailable
from yafsdp_cc.netlab.lab import Lab
from yafsdp_cc.netlab.links import Links
from yafsdp_cc.netlab.traffic import Traffic

__all__ = ["Lab", "LabError", "Links", "Traffic", "Unavailable"]
