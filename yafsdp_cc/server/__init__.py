"""A sharded parameter server: asynchronous SGD, with a bound on staleness and delay compensation (docs/exchange.md)."""

from yafsdp_cc.server.server import ParameterServer, ServerShard

__all__ = ["ParameterServer", "ServerShard"]
