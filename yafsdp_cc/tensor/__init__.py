"""Sharded parameters as users see them."""

from yafsdp_cc.tensor import operations as operations  # the import adds to the ``HANDLERS`` of ``tensor/dtensor.py``
from yafsdp_cc.tensor import patches as patches  # changes torch
