"""A sharded parameter server: asynchronous SGD, with a bound on staleness and delay compensation (docs/exchange.md)."""

from yafsdp_cc.server.server import ParameterServer
from yafsdp_cc.server.shard import ServerShard

__all__ = ["ParameterServer", "ServerShard"]
