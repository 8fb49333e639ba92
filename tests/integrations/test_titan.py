"""What torchtitan is given to parallelize a model with: on a model of its shape, and on its own where it is there.

torchtitan is in no extra of this package: of what it requires, one model needs little.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests import reference
from tests.integrations.examples import on_example, same, whole
from tests.ranks import ranks
from yafsdp_cc.integrations.titan import parallelize


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
        "mixed_precision_param": "float32",
        "mixed_precision_reduce": "float32",
    }
    parallelism = {"fsdp_reshard_after_forward": "never", "spmd_backend": "spmd_types"}
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


@pytest.mark.parametrize("name", ["tp", "spmd_backend"])
@ranks(1)
def test_what_it_cannot_do_is_refused_by_name(name: str) -> None:
    asked: dict[str, Any] = {"tp": 2, "spmd_backend": "full_dtensor"}
    with pytest.raises(NotImplementedError, match=name):
        parallelize(Decoder(), **_settings(**{name: asked[name]}))


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def test_the_example_equals_one_process_also_checkpointed_and_compiled() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    on_example("torchtitan_llama", _check)


def _check(ran: dict[str, Any]) -> None:
    plain, tokens = ran["make_model"](), ran["tokens"]
    plain.to_empty(device="cpu")
    plain.init_weights(buffer_device=None)  # the tables of its rotary embedding
    plain.load_state_dict(ran["whole"], strict=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def gradients(step: int) -> tuple[float, reference.Gradients]:
        return reference.mean_gradients(plain, _loss, [tokens[2 * step], tokens[2 * step + 1]])

    losses = torch.tensor(reference.train(plain, optimizer, gradients, steps=2, clip=0.5))
    mine = torch.tensor(ran["losses"])
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / 2, losses)
    same(whole(ran["model"]), plain)
    _check_wrapped(ran)


def _check_wrapped(ran: dict[str, Any]) -> None:
    """The gradients of a model that torchtitan checkpoints and compiles, too."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.activation_checkpoint import FullAC

    compiled = CompileConfig(enable=True, components=["model"], backend="aot_eager")
    settings = ran["settings"] | {"compile_config": compiled, "ac_config": FullAC.Config()}
    model, tokens = parallelize(ran["make_model"](), **settings), ran["tokens"]
    for copy, parameter in zip(model.parameters(), ran["model"].parameters(), strict=True):
        copy.detach().copy_(parameter.detach())
    _loss(model, tokens[dist.get_rank()]).backward()
    ran["model"].zero_grad()
    _loss(ran["model"], tokens[dist.get_rank()]).backward()
    found = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    for name, parameter in ran["model"].named_parameters():
        torch.testing.assert_close(found[name].full_tensor(), parameter.grad.full_tensor())
