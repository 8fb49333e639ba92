"""Says where the modelled network is."""

raise ModuleNotFoundError(
    "yafsdp_cc.bench.modelled is bench/modelled.py of the repository now: in its root, from bench.modelled import begin"
)
