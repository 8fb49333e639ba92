"""What is gathered together, and what that costs: known and printable before the first step.

``parameters`` says what a model owns, ``blocks`` finds its repeated blocks, ``units`` divides the parameters among
units, ``ownership`` whole matrices among ranks, and ``report`` is the printed plan. Nothing here imports
``torch.distributed``: a plan needs no process group.
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
