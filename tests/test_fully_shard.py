"""Programs of FSDP2's API, run with torch's ``fully_shard`` and with ours: equal losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
import torch._dynamo  # by the optimizers, at a second for every rank if not before the fork
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests.models import VOCABULARY, Transformer
from tests.ranks import on_ranks
from tests.test_training import seeded, whole

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RETURNING_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
Api = Any
Figures = dict[str, Tensor]


class Run:
    """One model sharded bottom-up through ``api``, its optimizer, and all that is to be compared."""

    def __init__(self, api: Api, model: nn.Module | None = None, apart: bool = False, **options: Any) -> None:
        self.api = api
        self.model: Any = seeded(Transformer) if model is None else model
        for block in self.model.blocks:
            api.fully_shard(block, **options)
        if apart:
            api.fully_shard(self.model.embed, **options)
            api.fully_shard([self.model.norm, self.model.head], **options)
        api.fully_shard(self.model, **options)
        self._start(self.model.parameters())

    @classmethod
    def of_sharded(cls, api: Api, model: nn.Module, ignored: Collection[nn.Parameter] = ()) -> Run:
        """Of a model that the program has sharded itself."""
        run = cls.__new__(cls)
        run.api, run.model = api, model
        run._start(parameter for parameter in model.parameters() if parameter not in ignored)
        return run

    def _start(self, parameters: Iterable[nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.figures: Figures = {}
        self.count = 0

    def loss(self, model: Any = None) -> Tensor:
        self.count += 1
        draws = torch.Generator().manual_seed(100 * self.count + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (2, 12), generator=draws)
        logits = (self.model if model is None else model)(tokens)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def backward(self) -> None:
        loss = self.loss()
        self.figures[f"loss {self.count}"] = loss.detach().clone()
        loss.backward()

    def look(self) -> None:
        """Take down the gradients."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.figures[f"{self.count} gradient of {name}"] = whole(parameter.grad).clone()

    def step(self) -> None:
        self.look()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.figures[f"{self.count} norm"] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = 3) -> None:
        for _ in range(count):
            self.backward()
            self.step()

    def done(self) -> Figures:
        for name, value in self.model.state_dict().items():
            self.figures[f"weight {name}"] = whole(value).clone()
        return self.figures


# -- programs ---------------------------------------------------------------------------------------------------------


def trains(api: Api) -> Run:
    run = Run(api)
    run.steps()
    return run


def in_five_units(api: Api) -> Run:
    run = Run(api, apart=True)
    run.steps()
    return run


def keeps(api: Api) -> Run:
    run = Run(api, reshard_after_forward=False)
    run.steps()
    return run


def keeps_by_number(api: Api) -> Run:
    run = Run(api, reshard_after_forward=1)
    run.steps()
    return run


def in_bf16(api: Api) -> Run:
    run = Run(api, mp_policy=BF16)
    run.steps()
    return run


def in_mixed_policies(api: Api) -> Run:
    model: Any = seeded(Transformer)
    for index, block in enumerate(model.blocks):
        api.fully_shard(block, mp_policy=RETURNING_FP32 if index == 1 else MixedPrecisionPolicy())
    api.fully_shard(model)
    run = Run.of_sharded(api, model)
    run.steps()
    return run


def with_frozen_parameters(api: Api) -> Run:
    model = seeded(Transformer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("qkv" not in name and "embed" not in name)
    run = Run(api, model)
    run.steps(2)
    run.model.embed.weight.requires_grad_(True)
    run.steps(2)
    return run


def tied(api: Api) -> Run:
    run = Run(api, seeded(lambda: Transformer(tied=True)))
    run.steps()
    return run


def accumulates(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        for part in range(3):
            run.backward()
            if part == 1:
                run.look()
        run.step()
    return run


def accumulates_without_communication(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        for part in range(3):
            run.model.set_requires_gradient_sync(part == 2)
            run.backward()
        run.step()
    return run


def accumulates_in_one_block(api: Api) -> Run:
    run = Run(api)
    for part in range(3):
        run.model.blocks[1].set_requires_gradient_sync(part == 2, recurse=False)
        run.backward()
    run.step()
    return run


def accumulates_without_the_end(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        for part in range(3):
            run.model.set_is_last_backward(part == 2)
            run.model.set_reshard_after_backward(part == 2)
            run.backward()
        run.step()
    return run


def changes_its_mind_about_resharding(api: Api) -> Run:
    run = Run(api)
    for reshards in (True, False, True):
        run.model.set_reshard_after_forward(reshards)
        run.steps(2)
    return run


def unshards_by_hand(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        handles = [block.unshard(async_op=True) for block in run.model.blocks]
        run.backward()
        for handle in handles:
            handle.wait()
        run.step()
        block = run.model.blocks[0]
        assert block.unshard() is None
        run.figures[f"{run.count} unsharded"] = block.qkv.weight.detach().clone()
        run.figures[f"{run.count} unsharded, small"] = block.norm1.weight.detach().clone()
        block.reshard()
        assert hasattr(block.qkv.weight, "full_tensor")
    return run


def prefetches_by_name(api: Api) -> Run:
    run = Run(api)
    blocks = list(run.model.blocks)
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    run.steps()
    return run


def divides_otherwise(api: Api) -> Run:
    run = Run(api)
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)  # torch's needs it over gloo
    run.steps()
    return run


def reduces_by_other_means(api: Api) -> Run:
    run = Run(api)
    run.model.set_separate_reduce_scatter_group()
    run.model.set_reduce_scatter_max_input_buffers(3)
    run.model.set_reduce_scatter_unused_params(True)
    run.model.set_requires_all_reduce(True)
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    run.steps()
    return run


def leaves_an_embedding_sharded_in_backward(api: Api) -> Run:
    run = Run(api, apart=True)
    run.model.embed.set_unshard_in_backward(False)
    run.steps()
    return run


def evaluates_in_between(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        run.model.eval()
        with torch.no_grad():
            run.figures[f"evaluation {run.count}"] = run.loss().clone()
        run.model.train()
        run.steps(1)
    return run


def recovers(api: Api) -> Run:
    run = Run(api)
    run.steps(1)
    fails = run.model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.loss()
    fails.remove()
    run.model.reset_iter_state()
    run.model.zero_grad()
    run.steps(2)
    return run


def enters_by_another_way(api: Api) -> Run:
    model: Any = seeded(Transformer)
    type(model).generate = lambda self, tokens: self.forward(tokens)
    run = Run(api, model)
    api.register_fsdp_forward_method(run.model, "generate")
    api.register_fsdp_forward_method(nn.Linear(2, 2), "forward")
    run.loss(run.model.generate).backward()
    run.step()
    run.steps(2)
    return run


def checkpoints(api: Api) -> Run:
    model: Any = seeded(Transformer)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    run = Run(api, model)
    run.steps()
    return run


def from_meta(api: Api) -> Run:
    with torch.device("meta"):
        model = Transformer()
    run = Run(api, model)
    run.model.to_empty(device="cpu")
    plain = dict(seeded(Transformer).named_parameters())
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if api is yafsdp_cc:
                first, last = parameter._cut.owned
                parameter.to_local().copy_(plain[name].reshape(-1)[first:last].view(parameter.to_local().shape))
            else:
                parameter.to_local().copy_(plain[name].chunk(dist.get_world_size())[dist.get_rank()])
    run.steps()
    return run


def ignores_parameters(api: Api) -> Run:
    model: Any = seeded(Transformer)
    ignored = {model.norm.weight, model.norm.bias}
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model, ignored_params=ignored)
    run = Run.of_sharded(api, model, ignored)
    for _ in range(2):
        run.backward()
        for parameter in ignored:
            dist.all_reduce(parameter.grad)
            run.figures[f"{run.count} ignored {tuple(parameter.shape)}"] = parameter.grad.clone()
            parameter.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.done = lambda: run.figures  # type: ignore[method-assign]
    return run


def scales(api: Api) -> Run:
    run = Run(api)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    for _ in range(3):
        scaler.scale(run.loss()).backward()
        scaler.unscale_(run.optimizer)
        run.look()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    run.figures["scale"] = torch.tensor(scaler.get_scale())
    return run


def shares_lanes(api: Api) -> Run:
    one, other = Run(api), Run(api)
    api.share_comm_ctx([one.model, other.model])
    for _ in range(2):
        one.steps(1)
        other.steps(1)
    one.figures |= {f"other {name}": value for name, value in other.done().items()}
    return one


def on_an_explicit_mesh(api: Api) -> Run:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    run = Run(api, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False), shard_placement_fn=lambda _: Shard(0))
    run.steps()
    return run


def _replicated(api: Api, **options: Any) -> Run:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return Run(api, mesh=mesh, **options)


def with_replicas(api: Api) -> Run:
    run = _replicated(api)
    run.steps()
    return run


def with_replicas_in_bf16(api: Api) -> Run:
    run = _replicated(api, mp_policy=BF16)
    run.steps()
    return run


def with_replicas_summed_at_the_end(api: Api) -> Run:
    run = _replicated(api)
    for _ in range(2):
        for part in range(3):
            run.model.set_requires_all_reduce(part == 2)
            run.backward()
        run.step()
    return run


def with_replicas_synchronised_at_the_end(api: Api) -> Run:
    run = _replicated(api)
    for _ in range(2):
        for part in range(3):
            run.model.set_requires_gradient_sync(part == 2)
            run.backward()
        run.step()
    return run


def gathers_from_a_second_shard(api: Api) -> Run:
    run = Run(api, reshard_after_forward=2)
    for _ in range(2):
        run.backward()
        run.backward()
        run.step()
    return run


PROGRAMS: list[Callable[[Api], Run]] = [
    trains,
    in_five_units,
    keeps,
    keeps_by_number,
    in_bf16,
    in_mixed_policies,
    with_frozen_parameters,
    tied,
    accumulates,
    accumulates_without_communication,
    accumulates_in_one_block,
    accumulates_without_the_end,
    changes_its_mind_about_resharding,
    unshards_by_hand,
    prefetches_by_name,
    divides_otherwise,
    reduces_by_other_means,
    leaves_an_embedding_sharded_in_backward,
    evaluates_in_between,
    recovers,
    enters_by_another_way,
    checkpoints,
    from_meta,
    ignores_parameters,
    scales,
    shares_lanes,
    on_an_explicit_mesh,
    with_replicas,
    with_replicas_in_bf16,
    with_replicas_summed_at_the_end,
    with_replicas_synchronised_at_the_end,
    gathers_from_a_second_shard,
]


IN_BF16 = (in_bf16, in_mixed_policies, with_replicas_in_bf16)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("world", [2, 4])
def test_runs_as_with_fsdp2(program: Callable[[Api], Run], world: int) -> None:
    on_ranks(world, side_by_side, program)


def side_by_side(program: Callable[[Api], Run]) -> None:
    truth, found = (program(api).done() for api in (torch_fsdp, yafsdp_cc))
    assert found.keys() == truth.keys(), found.keys() ^ truth.keys()
    for name, value in truth.items():
        distance = (found[name].double() - value.double()).norm() / (value.double().norm() + 1e-30)
        within = 2e-2 if program in IN_BF16 else 1e-5 if "weight" in name else 1e-6
        assert distance <= within, f"{name} is off by {distance:.1e}"


@pytest.mark.parametrize("replicas", [1, 2])
def test_sharded_parameters_are_initialised_as_plain_ones(replicas: int) -> None:
    on_ranks(4, _initialised, replicas)


def _initialised(replicas: int) -> None:
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model: Any = Transformer()
    for block in model.blocks:
        yafsdp_cc.fully_shard(block, mesh=mesh)
    ignored = model.norm.weight
    yafsdp_cc.fully_shard(model, mesh=mesh, ignored_params={ignored})
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError, match=r"'blocks.0.qkv.weight' is still on the meta device: call model.to_empty"):
        model(torch.zeros(1, 2, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = Transformer()
    model.to_empty(device="cpu")
    for one in (model, plain):
        torch.manual_seed(3)
        for module in one.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for name, parameter in model.named_parameters():
        value = parameter if parameter is ignored else whole(parameter.detach())
        assert torch.equal(value, plain.get_parameter(name)), name
    assert model.norm.weight is ignored
    tokens = torch.arange(12).view(2, 6)
    assert torch.allclose(model(tokens), plain(tokens), atol=1e-5)
    model(tokens).square().mean().backward()
    optimizer.step()


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "a list of modules without a forward": (
        lambda m: yafsdp_cc.fully_shard(m.blocks),
        ValueError,
        "does not support containers",
    ),
    "what is no module": (lambda m: yafsdp_cc.fully_shard([m.blocks[0], 3]), ValueError, "got 3"),
    "twice": (lambda m: [yafsdp_cc.fully_shard(m) for _ in range(2)], ValueError, "already been applied"),
    "a tied parameter apart": (
        lambda m: [setattr(m.head, "weight", m.embed.weight), *map(yafsdp_cc.fully_shard, (m.embed, m.head))],
        ValueError,
        "fully_shard\\(\\[one, other\\]\\)",
    ),
    "another dimension": (
        lambda m: yafsdp_cc.fully_shard(m, shard_placement_fn=lambda _: Shard(1)),
        NotImplementedError,
        "flat ranges",
    ),
    "a number of ranks": (lambda m: yafsdp_cc.fully_shard(m, reshard_after_forward=3), ValueError, "a factor of 2"),
    "a word": (lambda m: yafsdp_cc.fully_shard(m, reshard_after_forward="yes"), ValueError, "a bool or an int"),
    "another mesh inside": (
        lambda m: [
            yafsdp_cc.fully_shard(m.blocks[0]),
            yafsdp_cc.fully_shard(m, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))),
            m(torch.zeros(1, 2, dtype=torch.long)),
        ],
        ValueError,
        r"'\(root\)' is sharded across .* 'blocks.0' across .* takes one mesh",
    ),
    "an optimizer before": (
        lambda m: (torch.optim.SGD(m.parameters(), lr=0.1), yafsdp_cc.fully_shard(m)),
        ValueError,
        "make it after",
    ),
    "a custom reduce-scatter": (
        lambda m: yafsdp_cc.fully_shard(m).set_custom_reduce_scatter(None),
        NotImplementedError,
        "no meaning here",
    ),
    "no bool": (lambda m: yafsdp_cc.fully_shard(m).set_reshard_after_forward(1), ValueError, "should be a bool"),
    "a divisor of nothing": (
        lambda m: yafsdp_cc.fully_shard(m).set_gradient_divide_factor(0),
        ValueError,
        "other than 0",
    ),
    "a plain module to prefetch": (
        lambda m: yafsdp_cc.fully_shard(m).set_modules_to_forward_prefetch([m.head]),
        ValueError,
        "Expects FSDPModule",
    ),
    "a reset inside": (
        lambda m: [yafsdp_cc.fully_shard(m.blocks[0]), yafsdp_cc.fully_shard(m), m.blocks[0].reset_iter_state()],
        RuntimeError,
        "for the root module",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    on_ranks(2, _refused, case)


def _refused(case: str) -> None:
    attempt, error, said = REFUSED[case]
    with pytest.raises(error, match=f"(?s){said}"):
        attempt(seeded(Transformer))
