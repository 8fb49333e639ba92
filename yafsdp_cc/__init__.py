"""A sharded data-parallel engine for PyTorch that compresses what it sends."""

from yafsdp_cc.api import counters_of, plan_of, shard
from yafsdp_cc.engine.module import register_forward_method
from yafsdp_cc.engine.whole import whole_parameters

__all__ = ["counters_of", "plan_of", "register_forward_method", "shard", "whole_parameters"]
