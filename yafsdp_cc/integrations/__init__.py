"""Adapters for other training frameworks. An adapter imports its framework only when one of its functions is called."""

from yafsdp_cc.integrations import accelerate, lightning, pipelining, titan, transformers

__all__ = ["accelerate", "lightning", "pipelining", "titan", "transformers"]
