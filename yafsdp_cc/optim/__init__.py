"""Optimizers of the 1-bit family: exact sums for a short while, then encoded ones of about a bit per element."""

from yafsdp_cc.optim.adam import OneBitAdam
from yafsdp_cc.optim.lamb import OneBitLamb
from yafsdp_cc.optim.replicated import ReplicatedOneBitAdam
from yafsdp_cc.optim.sgd import OneBitSGD
from yafsdp_cc.optim.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "OneBitSGD", "ReplicatedOneBitAdam", "ZeroOneAdam"]
