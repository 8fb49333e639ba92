"""Checkpoints, over ``torch.distributed.checkpoint``: ``save``, ``load``, whole state dicts and safetensors.

Begin at ``save`` and ``load``; ``full`` has whole weights; ``files`` makes a save whole or nothing, ``writer``
adds checksums, ``reader`` compares them and runs no code from files, ``state`` and ``compression`` are what a
checkpoint holds.
"""
