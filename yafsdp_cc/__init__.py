"""A sharded data-parallel engine for PyTorch that compresses what it sends."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # ``import x as x`` makes a name public to type checkers
    from yafsdp_cc import compression as compression
    from yafsdp_cc import integrations as integrations
    from yafsdp_cc import optim as optim
    from yafsdp_cc import pipelining as pipelining
    from yafsdp_cc import profiling as profiling
    from yafsdp_cc import replicas as replicas
    from yafsdp_cc import server as server
    from yafsdp_cc.api import counters_of as counters_of
    from yafsdp_cc.api import fully_shard as fully_shard
    from yafsdp_cc.api import plan_of as plan_of
    from yafsdp_cc.api import register_fsdp_forward_method as register_fsdp_forward_method
    from yafsdp_cc.api import shard as shard
    from yafsdp_cc.api import watch_loss as watch_loss
    from yafsdp_cc.batches.skipped import PeerFailedError as PeerFailedError
    from yafsdp_cc.batches.skipped import skip_together as skip_together
    from yafsdp_cc.batches.uneven import uneven as uneven
    from yafsdp_cc.checkpoint.full import full_state_dict as full_state_dict
    from yafsdp_cc.checkpoint.full import load_safetensors as load_safetensors
    from yafsdp_cc.checkpoint.full import save_safetensors as save_safetensors
    from yafsdp_cc.checkpoint.load import load as load
    from yafsdp_cc.checkpoint.patch import WeightPatch as WeightPatch
    from yafsdp_cc.checkpoint.patch import weight_patch as weight_patch
    from yafsdp_cc.checkpoint.save import save as save
    from yafsdp_cc.compression import Compression as Compression
    from yafsdp_cc.compression.ddp import CompressionHookState as CompressionHookState
    from yafsdp_cc.compression.ddp import encoded_mean as encoded_mean
    from yafsdp_cc.compression.fsdp2 import compress as compress
    from yafsdp_cc.compression.schedule import follow_scaler as follow_scaler
    from yafsdp_cc.fsdp2.module import UnshardHandle as UnshardHandle
    from yafsdp_cc.fsdp2.module import register_forward_method as register_forward_method
    from yafsdp_cc.fsdp2.module import share_comm_ctx as share_comm_ctx
    from yafsdp_cc.fsdp2.module import unshard_model as unshard_model
    from yafsdp_cc.fsdp2.module import whole_parameters as whole_parameters
    from yafsdp_cc.replicas.sync import join_replicas as join_replicas
    from yafsdp_cc.replicas.sync import synchronize_replicas as synchronize_replicas
    from yafsdp_cc.rescue.divergence import DivergenceError as DivergenceError
    from yafsdp_cc.rescue.divergence import DivergenceWatch as DivergenceWatch
    from yafsdp_cc.rescue.rescue import Rescue as Rescue
    from yafsdp_cc.tensor.loading import patch_torch as patch_torch
    from yafsdp_cc.tools import netlab as netlab
    from yafsdp_cc.tools.metrics import Metrics as Metrics

for _module, _package in {"torch": "torch", "pydantic": "pydantic", "yaml": "pyyaml"}.items():
    if importlib.util.find_spec(_module) is None:
        raise ModuleNotFoundError(f"yafsdp_cc needs {_package}: pip install {_package}", name=_module)

# Public names are imported at first use: the command line's help shall not wait seconds for the import of torch.
_NAMES = {
    "yafsdp_cc.api": "counters_of fully_shard plan_of register_fsdp_forward_method shard watch_loss",
    "yafsdp_cc.batches.skipped": "PeerFailedError skip_together",
    "yafsdp_cc.batches.uneven": "uneven",
    "yafsdp_cc.checkpoint.full": "full_state_dict load_safetensors save_safetensors",
    "yafsdp_cc.checkpoint.load": "load",
    "yafsdp_cc.checkpoint.patch": "weight_patch WeightPatch",
    "yafsdp_cc.checkpoint.save": "save",
    "yafsdp_cc.compression": "Compression",
    "yafsdp_cc.compression.ddp": "CompressionHookState encoded_mean",
    "yafsdp_cc.compression.fsdp2": "compress",
    "yafsdp_cc.compression.schedule": "follow_scaler",
    "yafsdp_cc.fsdp2.module": "register_forward_method share_comm_ctx unshard_model UnshardHandle whole_parameters",
    "yafsdp_cc.replicas.sync": "join_replicas synchronize_replicas",
    "yafsdp_cc.rescue.divergence": "DivergenceError DivergenceWatch",
    "yafsdp_cc.rescue.rescue": "Rescue",
    "yafsdp_cc.tensor.loading": "patch_torch",
    "yafsdp_cc.tools.metrics": "Metrics",
}
"""Public names, by the module that defines them."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {
    "netlab": "yafsdp_cc.tools.netlab",
    **{
        name: f"yafsdp_cc.{name}"
        for name in ("compression", "integrations", "optim", "pipelining", "profiling", "replicas", "server")
    },
}
"""Full names of the public modules, by short name."""

__all__ = [*_MODULES, *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("yafsdp_cc")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'yafsdp_cc' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_MODULE_OF[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
