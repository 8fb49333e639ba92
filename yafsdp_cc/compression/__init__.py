"""Compressed communication: codecs with error feedback, and the collectives that use them in place of exact ones.

Start with ``factory.CompressedCollectives``, the factory that the engine is given; ``config.Compression`` is what
users write. The engine knows nothing of this package.
"""

from yafsdp_cc.compression import codecs  # noqa: F401 (the built-in codecs register themselves)
from yafsdp_cc.compression.config import Compression

__all__ = ["Compression"]
