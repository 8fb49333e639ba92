"""Compressed communication: codecs with error feedback, and the collectives that use them in place of exact ones.

Start with ``schedule.CompressedCollectives``, the factory that the engine is given; ``config.Compression`` is what users
write. Imports point down: ``config`` and ``codec`` know nothing of the engine, and the engine knows nothing of this.
"""

from yafsdp_cc.compression.config import Compression

__all__ = ["Compression"]
