"""What one rank alone asks of a sharded model: an answer or an error at once, and never a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.models import WIDTH
from tests.ranks import ranks
from yafsdp_cc.tools.metrics import Metrics

QUERIES: dict[str, Callable[[Any], object]] = {
    "plan_of": lambda model: str(yafsdp_cc.plan_of(model)),
    "counters_of": yafsdp_cc.counters_of,
    "watch_loss": lambda model: yafsdp_cc.watch_loss(model, 1.0),
    "weight_patch": yafsdp_cc.weight_patch,
    "parameters": lambda model: [(str(each), each.shape) for each in model.parameters()],
    "state_dict": lambda model: model.state_dict(),
    "repr": repr,
    "set_post_optim_event": lambda model: model.set_post_optim_event(None),
    "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
}
"""What is no collective."""

SETTERS: dict[str, Callable[[Any], object]] = {
    "reshard_after_forward": lambda model: model.set_reshard_after_forward(False),
    "reshard_after_backward": lambda model: model.set_reshard_after_backward(False),
    "unshard_in_backward": lambda model: model[0].set_unshard_in_backward(False),
    "forward_prefetch": lambda model: model[0].set_modules_to_forward_prefetch([model[1], model[2]]),
    "backward_prefetch": lambda model: model[1].set_modules_to_backward_prefetch([model[0]]),
    "all_reduce": lambda model: model.set_requires_all_reduce(False),
    "divide_factor": lambda model: model.set_gradient_divide_factor(3.0),
    "input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(3),
    "separate_group": lambda model: model.set_separate_reduce_scatter_group(True),
    "share_comm_ctx": lambda model: yafsdp_cc.share_comm_ctx([model]),
    "gradient_sync": lambda model: model.set_requires_gradient_sync(False),  # other buffers wait until it is True
}
CHANGE_BUFFERS = {"reshard_after_forward", "reshard_after_backward", "forward_prefetch", "unshard_in_backward"}


def sharded(by_hand: bool) -> Any:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if not by_hand:
        return yafsdp_cc.shard(model, units=["[0-9]"], mesh=mesh, compression="int8")
    for each in (*model, model):
        yafsdp_cc.fully_shard(each, mesh=mesh, compression="int8")
    return model


def asked(model: Any, rank: int) -> dict[str, str]:
    """What each query says on one rank, while the others wait elsewhere."""
    said = {}
    if dist.get_rank() == rank:
        for name, query in QUERIES.items():
            try:
                query(model)
                said[name] = ""
            except (RuntimeError, ValueError) as error:
                said[name] = f"{type(error).__name__}: {error}"
    dist.barrier()  # nobody has begun another collective, and nobody was waited for
    return said


def step(model: Any) -> None:
    model(torch.randn(2, WIDTH)).sum().backward()


@ranks(2, patience=20)
def test_one_rank_alone_asks() -> None:
    torch.manual_seed(0)
    alone = 1
    for by_hand in (True, False):
        model = sharded(by_hand)
        before = asked(model, alone)
        if dist.get_rank() == alone:
            refused = {name for name, text in before.items() if text}
            assert refused == ({"plan_of", "counters_of", "watch_loss", "weight_patch"} if by_hand else set()), before
            assert all("run a forward on all ranks first" in before[name] for name in refused)
        step(model)
        assert not any(asked(model, alone).values())
        for name, change in SETTERS.items():
            change(model)
            said = asked(model, alone)
            assert {each for each, text in said.items() if text} <= {"plan_of"}, said
            if dist.get_rank() == alone and name in CHANGE_BUFFERS:
                assert "a setting has changed" in said["plan_of"], (name, said)
            step(model)
            assert not any(asked(model, alone).values()), name


@ranks(2)
def test_a_part_and_a_wrapper_of_a_model_are_told_from_a_plain_one() -> None:
    model, blocks = sharded(by_hand=False), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    yafsdp_cc.fully_shard(blocks[1])
    head = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    yafsdp_cc.shard(head, units=["1"])
    for wrong, said in (
        (nn.ModuleDict({"net": model}), "this ModuleDict is not sharded itself, as its 'net' is: pass the module that"),
        (blocks, "as its '1' is: .*, or call yafsdp_cc.fully_shard on the model, too"),
        (head[0], r"this Sequential is not sharded itself, and part of a model that is: pass the model that was given"),
        (nn.Linear(2, 2), r"this Linear is not sharded: call yafsdp_cc.shard\(model\) first"),
    ):
        for query in (yafsdp_cc.plan_of, yafsdp_cc.counters_of, yafsdp_cc.full_state_dict):
            with pytest.raises(ValueError, match=said):
                query(wrong)


COLLECTIVES = (
    *(yafsdp_cc.shard, yafsdp_cc.fully_shard, yafsdp_cc.save, yafsdp_cc.load, yafsdp_cc.full_state_dict),
    *(yafsdp_cc.save_safetensors, yafsdp_cc.load_safetensors, yafsdp_cc.whole_parameters, yafsdp_cc.unshard_model),
    *(yafsdp_cc.skip_together, yafsdp_cc.uneven, yafsdp_cc.join_replicas, yafsdp_cc.synchronize_replicas, Metrics),
    yafsdp_cc.follow_scaler,
)


@pytest.mark.parametrize("each", COLLECTIVES, ids=lambda each: each.__name__)
def test_a_collective_says_so_in_its_first_line(each: Any) -> None:
    assert "collective" in (each.__doc__ or "").splitlines()[0].lower()
