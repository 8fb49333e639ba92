"""Adapters for other frameworks. Each module imports its framework when it is called."""

from yafsdp_cc.integrations import accelerate, lightning, pipelining, titan, transformers

__all__ = ["accelerate", "lightning", "pipelining", "titan", "transformers"]
