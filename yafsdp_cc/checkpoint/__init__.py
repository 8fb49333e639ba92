"""Checkpoints, over ``torch.distributed.checkpoint``: ``save``, ``load``, whole state dicts and safetensors.

``save`` and ``load`` are read top-down; ``folder`` makes a save whole or nothing, ``reader`` runs no code from files,
``match`` says what does not fit, ``state`` and ``extra`` are what a checkpoint holds.
"""
