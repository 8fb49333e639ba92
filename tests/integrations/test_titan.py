"""What torchtitan is given to parallelize a model with: on a model of its shape, and in its own Trainer."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import yafsdp_cc
from tests.integrations.examples import on_example, same, whole
from tests.ranks import ranks
from tests.soak import LONG
from yafsdp_cc.integrations.titan import parallelize

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed (extra 'hf')")


class Layer(nn.Linear):
    """Initialises its own parameters and buffers by the names that torchtitan's modules have for it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("scale", torch.empty(1), persistent=False)

    def _init_self_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.ones_(self.bias)

    def _init_self_buffers(self) -> None:
        self.scale = torch.full((1,), 2.0, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * super().forward(x).tanh()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Layer(32) for index in range(3)})
        self.lm_head = Layer(32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        out: Tensor = self.lm_head(x)
        return out


def _settings(**changes: Any) -> dict[str, Any]:
    dims = dict.fromkeys(("dp_replicate", "tp", "cp", "pp", "ep"), 1) | {"dp_shard": 2}
    training = {
        "enable_cpu_offload": False,
        "disable_cuda_graphs": False,
        "mixed_precision_param": "float32",
        "mixed_precision_reduce": "float32",
    }
    parallelism = {
        "fsdp_reshard_after_forward": "never",
        "spmd_backend": "spmd_types",
        "enable_fsdp_symm_mem": False,
    }
    for part in (dims, training, parallelism):
        part.update({name: value for name, value in changes.items() if name in part})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "parallel_dims": SimpleNamespace(**dims, get_mesh=lambda _: mesh),
        "training": SimpleNamespace(**training),
        "parallelism": SimpleNamespace(**parallelism),
        "compile_config": SimpleNamespace(enable=False),
        "ac_config": None,
        "dump_folder": "",
    }


@pytest.mark.parametrize("offloads", [False, True])
@ranks(2)
def test_a_model_on_the_meta_device_is_initialised_and_sharded(offloads: bool) -> None:
    with torch.device("meta"):
        model: Any = Decoder()
    torch.manual_seed(3)
    assert parallelize(model, **_settings(enable_cpu_offload=offloads)) is model
    plain = Decoder()
    torch.manual_seed(3)
    for layer in (*plain.layers.values(), plain.lm_head):
        layer._init_self_parameters()
        layer._init_self_buffers()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    assert torch.equal(model(torch.ones(2, 32)), plain(torch.ones(2, 32)))
    plan = yafsdp_cc.plan_of(model)
    assert [unit.name for unit in plan.units] == ["layers.0", "layers.1", "layers.2", "lm_head"]
    assert plan.communication.gather_backward == 0  # "never"
    assert (plan.host_bytes > 0) is offloads
    inputs = torch.randn(2, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    (model(inputs).square().sum() / 4).backward()  # of all tokens, as torchtitan divides its losses
    for rank in range(2):
        inputs = torch.randn(2, 32, generator=torch.Generator().manual_seed(rank))
        (plain(inputs).square().sum() / 4).backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    same(
        gradients, {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    )


@ranks(1)
def test_what_it_cannot_do_is_refused_by_name() -> None:
    asked = {"tp": 2, "spmd_backend": "full_dtensor", "enable_fsdp_symm_mem": True}
    for name, value in asked.items():
        with pytest.raises(NotImplementedError, match=name):
            parallelize(Decoder(), **_settings(**{name: value}))
    settings = _settings()
    settings["parallel_dims"].get_mesh = lambda _: SimpleNamespace(device_type="cuda")
    with pytest.raises(NotImplementedError, match=r"--training\.disable_cuda_graphs"):
        parallelize(Decoder(), **settings)


needs_titan = pytest.mark.skipif(
    find_spec("torchtitan") is None or find_spec("triton") is None,
    reason="torchtitan is not installed, or triton, which it imports on CPUs, too (extra 'titan')",
)


@needs_titan
def test_its_trainer_goes_on_from_checkpoints_of_fsdp2_and_fsdp2_from_ours() -> None:
    on_example("torchtitan_llama", _check)


def _check(ran: dict[str, Any]) -> None:
    """The example's run, its last two steps by FSDP2 and its last one by us, checkpointed and compiled otherwise."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.activation_checkpoint import FullAC

    config = ran["make_config"](_folder_from(ran["folder"], step=2), _parallelize_fsdp2)
    config.parallelism.spmd_backend = "partial_dtensor"  # torch 2.13 has not what FSDP2 needs for the default
    config.checkpoint.interval = 1
    theirs, losses, validated = _train(ran, config)
    _compare(ran, theirs.model_parts[0], losses, validated, steps=2)

    config = ran["make_config"](_folder_from(config.dump_folder, step=3))
    config.activation_checkpoint = FullAC.Config()
    config.compile = CompileConfig(enable=True, components=["model"], backend="aot_eager")
    config.checkpoint.last_save_model_only = config.checkpoint.last_save_in_hf = True
    ours, losses, validated = _train(ran, config)
    _compare(ran, ours.model_parts[0], losses, validated, steps=1)
    exported = f"{config.dump_folder}/checkpoint/step-4/model-00001-of-00001.safetensors"
    expected = ours.checkpointer.sd_adapter.to_hf(theirs.model_parts[0].state_dict())
    same(safetensors.load_file(exported), {name: tensor.full_tensor() for name, tensor in expected.items()})


@LONG
@needs_titan
def test_its_trainer_with_replicas_and_a_head_tied_to_the_embedding() -> None:
    on_example("torchtitan_llama", _check_replicas, world=4)


def _check_replicas(ran: dict[str, Any]) -> None:
    def configured(folder: str, *parallelize_fn: Any) -> Any:
        config = ran["make_config"](folder, *parallelize_fn)
        config.model_spec.model.enable_weight_tying = True
        config.parallelism.data_parallel_replicate_degree = 2
        return config

    config = configured(_folder_from(ran["folder"]), _parallelize_fsdp2)
    config.parallelism.spmd_backend = "partial_dtensor"
    trainer, losses, validated = _train(ran, config)
    theirs = {"trainer": trainer, "losses": losses, "validated": validated}
    ours, losses, validated = _train(ran, configured(_folder_from(config.dump_folder, step=2)))
    _compare(theirs, ours.model_parts[0], losses, validated, steps=2)


def _parallelize_fsdp2(model: nn.Module, **settings: Any) -> nn.Module:
    from torchtitan.models.llama3 import parallelize_llama

    parallelize_llama(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
    return model


def _train(ran: dict[str, Any], config: Any) -> Any:
    import torchtitan.trainer

    torchtitan.trainer.time = SimpleNamespace(sleep=lambda _: None, perf_counter=perf_counter)  # it waits two seconds
    return ran["train"](config)


def _folder_from(folder: str, step: int | None = None) -> str:
    """Return a new folder, the same on all ranks, with the tokenizer of another and one of its checkpoints."""
    new = Path(folder, f"from-{step}")
    if dist.get_rank() == 0:
        new.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(folder, name), new)
        if step is not None:
            shutil.copytree(Path(folder, f"checkpoint/step-{step}"), new / f"checkpoint/step-{step}")
    dist.barrier()
    return str(new)


def _compare(ran: dict[str, Any], model: nn.Module, losses: Any, validated: Any, steps: int) -> None:
    """Losses, norms of gradients and weights after the last ``steps`` are those of another run."""
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(ran["losses"][-steps:]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(validated), torch.tensor(ran["validated"][-1:]), rtol=1e-5, atol=1e-5)
    same(_weights(model), _weights(ran["trainer"].model_parts[0]))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in whole(model).items()}
