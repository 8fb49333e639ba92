"""The plan of a sharded model: what is gathered together, and what it costs; printable before the first step.

``report`` is the plan and its tables; ``memory`` fills it from an engine.
"""

from yafsdp_cc.engine.spec import Role
from yafsdp_cc.plan.report import Plan
from yafsdp_cc.sharding.ownership import MatrixOwners, Ownership, assign_owners
from yafsdp_cc.sharding.parameters import OwnedParameter
from yafsdp_cc.sharding.units import Division, Units, UnitSpec, find_units

__all__ = [
    "Division",
    "MatrixOwners",
    "OwnedParameter",
    "Ownership",
    "Plan",
    "Role",
    "UnitSpec",
    "Units",
    "assign_owners",
    "find_units",
]
