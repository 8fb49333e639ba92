"""What ``fully_shard`` refuses, in FSDP2's words where it has some."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import yafsdp_cc
from tests.fully_shard.programs import Gathers, Sums
from tests.models import Transformer
from tests.ranks import ranks
from tests.twins import seeded

ONES = torch.ones(2, 32)

REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "a list of modules without a forward": (
        lambda m: yafsdp_cc.fully_shard(m.blocks),
        ValueError,
        "does not support containers .* this ModuleList of 3 .Attention. is never called. Call fully_shard on each",
    ),
    "what is no module": (lambda m: yafsdp_cc.fully_shard([m.blocks[0], 3]), ValueError, "got 3"),
    "twice": (lambda m: [yafsdp_cc.fully_shard(m) for _ in range(2)], AssertionError, "already been applied"),
    "a tied parameter apart": (
        lambda m: [setattr(m.head, "weight", m.embed.weight), *map(yafsdp_cc.fully_shard, (m.embed, m.head))],
        ValueError,
        "fully_shard\\(\\[one, other\\]\\)",
    ),
    "a dimension that is not there": (
        lambda m: yafsdp_cc.fully_shard(m, shard_placement_fn=lambda p: Shard(p.ndim)),
        ValueError,
        r"returns Shard\(2\) for 'embed.weight' of \[96, 32\]: its dimensions are -2 to 1",
    ),
    "no dimension": (
        lambda m: yafsdp_cc.fully_shard(m, shard_placement_fn=lambda _: Replicate()),
        NotImplementedError,
        r"for 'embed.weight': it may return None or Shard\(dim\)",
    ),
    "a number of ranks": (
        lambda m: yafsdp_cc.fully_shard(m, reshard_after_forward=3),
        ValueError,
        "=3: pass a factor of 2, .* .1, 2., True",
    ),
    "a word": (lambda m: yafsdp_cc.fully_shard(m, reshard_after_forward="yes"), ValueError, "a bool or an int"),
    "replicas of a part": (
        lambda m: [
            yafsdp_cc.fully_shard(m.blocks[0]),
            yafsdp_cc.fully_shard(m, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))),
            m(torch.zeros(1, 2, dtype=torch.long)),
        ],
        ValueError,
        r"'blocks.0' is sharded across .* '\(root\)' around it across .* both take the same replicas",
    ),
    "more ranks inside": (
        lambda m: [
            yafsdp_cc.fully_shard(m.blocks[0]),
            yafsdp_cc.fully_shard(m, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]),
            m(torch.zeros(1, 2, dtype=torch.long)),
        ],
        ValueError,
        r"'blocks.0' is sharded .* the mesh of the root has to have all ranks of the other",
    ),
    "compression of a part": (
        lambda m: [
            yafsdp_cc.fully_shard(
                m.blocks[0], compression="int8", mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
            ),
            yafsdp_cc.fully_shard(m, compression="int8"),
            m(torch.zeros(1, 2, dtype=torch.long)),
        ],
        ValueError,
        "a compression takes one mesh for all",
    ),
    "an optimizer made before": (
        lambda m: (optimizer := torch.optim.SGD(m.parameters(), lr=0.1), yafsdp_cc.fully_shard(m), optimizer.step()),
        RuntimeError,
        "SGD was made before 'embed.weight' was sharded .* make the optimizer after",
    ),
    "a custom all-gather that is none": (
        lambda m: yafsdp_cc.fully_shard(m).set_custom_all_gather(print),
        TypeError,
        r"set_custom_all_gather takes an object with allocate\(\)",
    ),
    "a custom all-gather of what is compressed": (
        lambda m: yafsdp_cc.fully_shard(m, compression="int8").set_custom_all_gather(Gathers()),
        ValueError,
        "its compression decides what is sent. Leave one of the two out",
    ),
    "a custom reduce-scatter of matrices that lie whole": (
        lambda m: yafsdp_cc.fully_shard(
            m.head, ownership="matrix", reshard_after_forward=False
        ).set_custom_reduce_scatter(Sums()),
        ValueError,
        "with ownership, ranks own parts of different lengths",
    ),
    "copies": (lambda m: copy.deepcopy(yafsdp_cc.fully_shard(m)), AssertionError, "copy the model before"),
    "no bool": (lambda m: yafsdp_cc.fully_shard(m).set_reshard_after_forward(1), ValueError, "should be a bool"),
    "a divisor of nothing": (
        lambda m: yafsdp_cc.fully_shard(m).set_gradient_divide_factor(0),
        ValueError,
        "other than 0",
    ),
    "a divisor that is text": (
        lambda m: yafsdp_cc.fully_shard(m).set_gradient_divide_factor("2"),
        ValueError,
        r"set_gradient_divide_factor\('2'\) takes a finite number other than 0",
    ),
    "a plain module to prefetch": (
        lambda m: yafsdp_cc.fully_shard(m).set_modules_to_forward_prefetch([m.head]),
        ValueError,
        "Expects FSDPModule",
    ),
    "a part of a unit by itself": (
        lambda m: [yafsdp_cc.fully_shard(m.blocks[0]), yafsdp_cc.fully_shard(m).unshard(), m.blocks[0].up(ONES)],
        NotImplementedError,
        r"'blocks.0.up' was called outside of unit 'blocks.0', .*: call model.get_submodule\('blocks.0'\), make "
        r"'blocks.0.up' a unit of its own, or call .*.unshard\(\) before$",
    ),
    "a reset inside": (
        lambda m: [yafsdp_cc.fully_shard(m.blocks[0]), yafsdp_cc.fully_shard(m), m.blocks[0].reset_iter_state()],
        RuntimeError,
        "for the root module",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@ranks(2)
def test_refused(case: str) -> None:
    attempt, error, said = REFUSED[case]
    with pytest.raises(error, match=f"(?s){said}"):
        attempt(seeded(Transformer))


@ranks(2)
def test_the_warning_of_kept_gradients_names_no_argument_of_shard() -> None:
    model: Any = seeded(Transformer)
    for module in (*model.blocks, model):
        yafsdp_cc.fully_shard(module)
    messages: list[str] = []
    logging.getLogger("yafsdp_cc").addFilter(lambda record: bool(messages.append(record.getMessage())) or True)
    model.set_requires_gradient_sync(False)
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert [each.rpartition(". ")[2] for each in messages] == [
        "Where every micro-batch may be reduced, leaving it on costs none"
    ] * (dist.get_rank() == 0)
