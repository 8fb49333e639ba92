"""The codecs that are built in. A file here, imported below, is all that a new one takes."""

from yafsdp_cc.compression.codecs import floats, fp8, int4, int8, onebit, ternary, topk

__all__ = ["floats", "fp8", "int4", "int8", "onebit", "ternary", "topk"]
