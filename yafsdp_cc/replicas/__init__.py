"""Replicas of a model that are joined by links too slow or too uneven for a sum in every step."""

from yafsdp_cc.replicas.gossip import Gossip
from yafsdp_cc.replicas.membership import Membership
from yafsdp_cc.replicas.outer import Outer
from yafsdp_cc.replicas.overlap import Overlap
from yafsdp_cc.replicas.sync import ReplicaSync

__all__ = ["Gossip", "Membership", "Outer", "Overlap", "ReplicaSync"]
