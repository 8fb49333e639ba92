"""Sharded parameters as users see them."""

from yafsdp_cc.tensor import operations as operations  # fills the table of handlers of ``tensor/dtensor.py``
from yafsdp_cc.tensor import patches as patches  # changes torch
