"""Programs of FSDP2's API: each runs with torch's ``fully_shard`` and with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests.fully_shard.run import Api, Run
from tests.internals import owned_range
from tests.models import VOCABULARY, Transformer
from tests.twins import seeded, whole

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RETURNING_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)


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
    run.steps()
    run.model.embed.weight.requires_grad_(True)
    run.steps()
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
    for reshards in (False, True):
        for part in range(3):
            run.model.set_is_last_backward(part == 2)
            run.model.set_reshard_after_backward(reshards or part == 2)
            run.backward()
            if reshards:  # else torch's has no gradients of the parameters that it shows
                run.look()
            if reshards and part == 0:
                run.model.zero_grad()
        run.step()
    return run


def changes_its_mind_about_resharding(api: Api) -> Run:
    run = Run(api)
    for reshards in (True, False, True):
        run.model.set_reshard_after_forward(reshards)
        run.steps()
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
        assert not any(isinstance(each, DTensor) for each in block.parameters())
        run.figures |= {f"{run.count} unsharded {name}": p.detach().clone() for name, p in block.named_parameters()}
        block.reshard()
        assert all(isinstance(each, DTensor) for each in block.parameters())
        loss = run.loss()
        for each in run.model.blocks:  # which the backward needs one after the other
            each.unshard()
        run.figures[f"{run.count} held"] = run.model.blocks[0].qkv.weight.detach().clone()
        loss.backward()
        run.step()
    return run


class WithoutLogits(Transformer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        hidden: torch.Tensor = self.norm(x)
        return hidden


def makes_logits_outside(api: Api) -> Run:
    """As fused losses do: of the head's weight, which stays unsharded from the forward to the backward."""
    run = Run(api, seeded(WithoutLogits))

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        hidden = run.model(tokens)
        found = dict(run.model.named_parameters())
        assert found["head.weight"] is run.model.head.weight
        for name, each in found.items():
            is_sharded = isinstance(each, DTensor)
            run.figures[f"{run.count} {name}"] = (whole(each) if is_sharded else each).detach().clone()
            run.figures[f"{run.count} {name} is sharded"] = torch.tensor(is_sharded)
        return nn.functional.linear(hidden, run.model.head.weight)

    for _ in range(3):
        run.loss(logits).backward()
        assert all(isinstance(each, DTensor) for each in run.model.parameters())
        run.step()
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


class Sends:
    """A custom collective of FSDP2's, which communicates what it has allocated."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.full(tuple(size), float("nan"), dtype=dtype, device=device)
        return self.memory.setdefault(made.data_ptr(), made)

    def _send(self, output: torch.Tensor, source: torch.Tensor) -> None:
        self.calls += 1
        assert all(each.untyped_storage().data_ptr() in self.memory for each in (output, source))


class Gathers(Sends, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._send(output_tensor, input_tensor)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Sums(Sends, ReduceScatter):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._send(output_tensor, input_tensor)
        assert op == dist.ReduceOp.SUM
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def by_custom_collectives(api: Api) -> Run:
    run, gathers, sums = Run(api), Gathers(), Sums()
    run.steps(1)
    for module in (run.model, *run.model.blocks):
        module.set_custom_all_gather(gathers)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(sums)
        with pytest.raises(AssertionError):
            module.set_allocate_memory_from_process_group_for_comm(True)
    run.steps()
    run.figures["sums"] = torch.tensor(sums.calls)
    assert gathers.calls >= sums.calls
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
    run.steps()
    return run


def enters_by_another_way(api: Api) -> Run:
    model: Any = seeded(Transformer)
    type(model).generate = lambda self, tokens: self.forward(tokens)
    run = Run(api, model)
    api.register_fsdp_forward_method(run.model, "generate")
    api.register_fsdp_forward_method(nn.Linear(2, 2), "forward")
    run.loss(run.model.generate).backward()
    run.step()
    run.steps()
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
                first, last = owned_range(parameter)
                parameter.to_local().copy_(plain[name].reshape(-1)[first:last].view(parameter.to_local().shape))
            else:
                parameter.to_local().copy_(plain[name].chunk(dist.get_world_size())[dist.get_rank()])
    run.steps()
    return run


class Asks(nn.Module):
    """Looks for its weights by all the ways that there are."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.recomputes = recomputes

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        found = dict(self.named_parameters())
        assert all(isinstance(each, nn.Parameter) for each in (*found.values(), self.inner.weight, self.outer.weight))
        assert found["outer.weight"] is next(self.outer.parameters()) is self.outer.weight
        assert {each.dtype for each in found.values()} == {next(self.parameters()).dtype} == {x.dtype}
        hidden = nn.functional.linear(x, found["inner.weight"], found["inner.bias"]).relu()
        return x + nn.functional.linear(hidden, next(self.outer.parameters()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._layers, x, use_reentrant=False) if self.recomputes else self._layers(x)


class AsksInTheModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([Asks(), Asks(recomputes=True)])
        self.head = nn.Linear(16, VOCABULARY)

    @property
    def dtype(self) -> torch.dtype:
        """As of Hugging Face models."""
        return next(each.dtype for each in self.parameters() if each.is_floating_point())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.dtype == torch.bfloat16
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        own = dict(self.named_parameters())
        return nn.functional.linear(x, own["head.weight"], own["head.bias"])


def asks_inside_a_forward(api: Api) -> Run:
    run = Run(api, seeded(AsksInTheModel), mp_policy=BF16)
    run.steps()
    assert run.model.dtype == torch.float32
    assert all(isinstance(each, DTensor) for each in run.model.parameters())
    return run


def _on_meta(api: Api) -> Any:
    with torch.device("meta"):
        model = Transformer()
    for block in model.blocks:
        api.fully_shard(block)
    return api.fully_shard(model)


def _distributed(full: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """As torchtitan and torchtune shard what each rank has read."""
    return {
        name: nn.Parameter(distribute_tensor(value, like[name].device_mesh, like[name].placements))
        if isinstance(like[name], DTensor)
        else value
        for name, value in full.items()
    }


def assigns(api: Api) -> Run:
    model, full = _on_meta(api), seeded(Transformer).state_dict()
    assert not model.load_state_dict(_distributed(full, model.state_dict()), assign=True).missing_keys
    run = Run.of_sharded(api, model)
    run.steps()
    model.load_state_dict(_distributed(full, model.state_dict()), assign=True)  # where there are values already
    if api is not yafsdp_cc:  # whose parameters remain the same objects
        run.optimizer.param_groups[0]["params"] = list(model.parameters())
        run.optimizer.state.clear()
    else:
        run.optimizer.state.clear()
    run.steps()
    return run


def assigns_in_parts(api: Api) -> Run:
    """As torchtune loads a model with adapters: these are made on each rank, and the base comes from a file."""
    model, full = _on_meta(api), seeded(Transformer).state_dict()
    adapters = [name for name in full if name.startswith("blocks.1.")]
    model.blocks[1].down.to_empty(device="cpu")
    for adapter in model.blocks[1].down.parameters():
        nn.init.constant_(adapter, 0.01)
    base = {name: value for name, value in full.items() if name not in adapters}
    missing, unexpected = model.load_state_dict(_distributed(base, model.state_dict()), strict=False, assign=True)
    assert (sorted(missing), unexpected) == (sorted(adapters), [])
    still = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert still == {name for name in adapters if "down" not in name}
    part = {name.removeprefix("blocks.1."): full[name] for name in still}
    model.blocks[1].load_state_dict(_distributed(part, model.blocks[1].state_dict()), strict=False, assign=True)
    run = Run.of_sharded(api, model)
    run.steps()
    return run


def loads_from_rank_0(api: Api) -> Run:
    model, full = _on_meta(api), seeded(Transformer).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    run = Run.of_sharded(api, model)
    run.steps()
    set_model_state_dict(model, seeded(Transformer, 1).state_dict() if dist.get_rank() == 0 else {}, options=options)
    run.steps()
    return run


def loads_optimizer_state_by_hand(api: Api) -> Run:
    """As torchtune and the tutorial of FSDP2 do."""
    run = Run(api)
    run.steps()
    state = run.optimizer.state_dict()
    for moments in state["state"].values():
        for name, value in moments.items():
            if isinstance(value, DTensor):
                full = value.full_tensor() * 2
                moments[name] = distribute_tensor(full, value.device_mesh, value.placements)
    run.optimizer.load_state_dict(state)
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
    run.done = lambda: run.figures
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


def shards_other_dimensions(api: Api) -> Run:
    """And reads its shards in that layout, rows and columns."""
    run = Run(api, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    run.steps()
    weight = run.model.blocks[1].down.weight
    with torch.no_grad():
        for dim in (0, 1):
            part = weight.redistribute(placements=[Shard(dim)])
            assert part.placements == (Shard(dim),)
            run.figures[f"along {dim}"] = part.to_local().clone()
            weight.copy_(part * 0.5)
    run.steps(1)
    return run


def steps_by_lbfgs(api: Api) -> Run:
    run = Run(api)
    optimizer = torch.optim.LBFGS(run.model.parameters(), lr=0.1, max_iter=3, history_size=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        run.count = 0  # the same batch
        loss = run.loss()
        loss.backward()
        dist.all_reduce(mean := loss.detach().clone())
        return mean

    for _ in range(3):
        run.figures[f"loss {_}"] = optimizer.step(closure)
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


class Experts(nn.Module):
    """Of which each rank runs those that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) / 4), nn.Parameter(torch.randn(4, 32, 16) / 8)
        self.scale = nn.Parameter(torch.ones(4, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down, scale = (each.to_local() if isinstance(each, DTensor) else each for each in self.parameters())
        return ((x.flatten(0, 1) @ up).relu() @ down * scale).sum(0).view(x.shape)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(16), nn.Linear(16, 16), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.experts(self.router(self.norm(x)))
        return out


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(Mixture() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def with_experts_on_another_mesh(api: Api) -> Run:
    """As torchtitan's: expert parallelism takes its ranks from those that the other parameters are sharded across."""
    world, model = dist.get_world_size(), seeded(Mixtures)
    sparse = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("efsdp", "ep"))
    dense = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for block in model.blocks:
        for name, parameter in list(block.experts.named_parameters()):
            divided = distribute_tensor(parameter.detach(), sparse["ep"], [Shard(0)])
            block.experts.register_parameter(name, nn.Parameter(divided))
        api.fully_shard(block.experts, mesh=sparse["efsdp"])
        block.experts.set_gradient_divide_factor(world)
        block.experts.set_force_sum_reduction_for_comms(True)  # torch's needs it over gloo
        api.fully_shard(block, mesh=dense)
    api.fully_shard(model, mesh=dense)
    run = Run.of_sharded(api, model)
    run.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if api is yafsdp_cc:  # experts are gathered in turn, while the block before computes, and into no block's buffer
        model.unshard()  # has the engine made before the first forward, on all ranks
        model.reshard()
        plan = yafsdp_cc.plan_of(model)
        assert [(unit.role, unit.buffer) for unit in plan.units if "experts" in unit.name] == [
            ("nested", 0),
            ("nested", 1),
            ("nested", 0),
        ]
    for _ in range(3):
        run.backward()
        run.look()
        if api is yafsdp_cc:  # FSDP2 has no norm over parameters of two meshes
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
            wholes = [whole(parameter.grad) for parameter in model.parameters()]
            assert torch.allclose(norm, torch.nn.utils.get_total_norm(wholes))
        run.optimizer.step()
        run.optimizer.zero_grad()
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
    makes_logits_outside,
    prefetches_by_name,
    divides_otherwise,
    reduces_by_other_means,
    by_custom_collectives,
    leaves_an_embedding_sharded_in_backward,
    evaluates_in_between,
    recovers,
    enters_by_another_way,
    checkpoints,
    from_meta,
    asks_inside_a_forward,
    assigns,
    assigns_in_parts,
    loads_from_rank_0,
    loads_optimizer_state_by_hand,
    ignores_parameters,
    scales,
    shares_lanes,
    on_an_explicit_mesh,
    shards_other_dimensions,
    steps_by_lbfgs,
    with_replicas,
    with_replicas_in_bf16,
    with_replicas_summed_at_the_end,
    with_replicas_synchronised_at_the_end,
    gathers_from_a_second_shard,
    with_experts_on_another_mesh,
]

IN_BF16 = (asks_inside_a_forward, in_bf16, in_mixed_policies, with_replicas_in_bf16)
