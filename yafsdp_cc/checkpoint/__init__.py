"""Checkpoints, over ``torch.distributed.checkpoint``: ``save``, ``load``, whole state dicts and safetensors.

``save`` and ``load`` are read top-down, ``full`` has whole weights; ``files`` makes a save whole or nothing, ``writer``
adds checksums, ``reader`` compares them and runs no code from files, ``state`` and ``compression`` are what a
checkpoint holds.
"""
