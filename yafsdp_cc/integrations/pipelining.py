"""A stage of ``torch.distributed.pipelining`` whose module is sharded: ``ShardedStage``."""

from yafsdp_cc.pipelining.sharded import ShardedStage as ShardedStage
