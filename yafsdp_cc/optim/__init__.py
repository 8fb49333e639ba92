"""Optimizers of sharded models: Muon and the base of others that update whole matrices, Adafactor, the 1-bit family.

The 1-bit family sums exactly for a short while, and then sends about a bit per element.
"""

from yafsdp_cc.optim.adafactor import Adafactor
from yafsdp_cc.optim.adam import OneBitAdam, ZeroOneAdam
from yafsdp_cc.optim.lamb import OneBitLamb
from yafsdp_cc.optim.matrix import MatrixOptimizer
from yafsdp_cc.optim.muon import Muon
from yafsdp_cc.optim.sgd import OneBitSGD

__all__ = [
    "Adafactor",
    "MatrixOptimizer",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitSGD",
    "ZeroOneAdam",
]
