"""Benchmarks of training and of its collectives beside torch's own, for ``yafsdp-cc bench`` and ``bench/``."""
