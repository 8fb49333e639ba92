"""What programs of frameworks do with FSDP2: each runs with torch's ``fully_shard`` and with ours.

Written for this test after reading what the frameworks do; ``bench/results/framework-programs.md`` has a table of them,
and of those in ``programs.py`` that are theirs, too.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

from tests.fully_shard.run import Api, Run
from tests.models import VOCABULARY, WIDTH, Attention, Transformer
from tests.test_tensor_parallel import Net as DividedNet
from tests.test_tensor_parallel import divided
from tests.twins import seeded

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def full(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def sharded_units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def draw(count: int, rank: int | None = None, rows: int = 2) -> Tensor:
    draws = torch.Generator().manual_seed(100 * count + (dist.get_rank() if rank is None else rank))
    return torch.randint(0, VOCABULARY, (rows, 12), generator=draws)


def losses_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")


# -- torchtitan -------------------------------------------------------------------------------------------------------


def _decoder(api: Api, model: Any = None, **options: Any) -> Run:
    """In the units of torchtitan: the last one, of norm and head, stays unsharded until its backward."""
    model = seeded(Transformer) if model is None else model
    options |= {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    api.fully_shard(model.embed, reshard_after_forward=True, **options)
    api.fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    for block in model.blocks:
        api.fully_shard(block, reshard_after_forward=True, **options)
    api.fully_shard(model, **options)
    return Run.of_sharded(api, model)


def divides_by_tokens_of_all_ranks(api: Api) -> Run:
    """Gradients are sums: the loss is divided by the number of tokens of all ranks and micro-batches."""
    run = _decoder(api)
    for unit in sharded_units(run.model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # torch's needs it over gloo
    for step in range(2):
        batches = [draw(10 * step + part, rows=1 + (dist.get_rank() + part) % 2) for part in range(2)]
        count = torch.tensor(sum(batch[:, 1:].numel() for batch in batches))
        dist.all_reduce(count)
        for batch in batches:
            (losses_of(run.model(batch), batch).sum() / count).backward()
        run.step()
    return run


def prefetches_in_both_directions(api: Api) -> Run:
    """The model, which has no weights of its own, is named as well."""
    run = _decoder(api)
    model = run.model
    order = [model.embed, *model.blocks]
    for unit, after in zip(order, [*model.blocks, [model.norm, model.head]], strict=True):
        unit.set_modules_to_forward_prefetch([model, *after] if isinstance(after, list) else [after])
    model.head.set_modules_to_backward_prefetch([model, model.blocks[-1]])
    for unit, before in zip(order[:0:-1], order[-2::-1], strict=True):
        unit.set_modules_to_backward_prefetch([before])
    run.steps()
    return run


class Headless(Transformer):
    """Whose forward leaves the head to the loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def computes_the_loss_in_chunks(api: Api) -> Run:
    """The head stays unsharded over the chunks, whose gradients are reduced once, after the last."""
    model: Any = seeded(Headless)
    for unit in (model.embed, *model.blocks, model.head):
        api.fully_shard(unit)
    run = Run.of_sharded(api, api.fully_shard(model))
    head = model.head
    for step in range(2):
        tokens = draw(step)
        hidden = model(tokens)
        parts = [each.detach().requires_grad_() for each in hidden.chunk(3, dim=1)]
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
        for place, (part, wanted) in enumerate(zip(parts, tokens.chunk(3, dim=1), strict=True)):
            head.set_requires_gradient_sync(place == 2, recurse=False)
            loss = functional.cross_entropy(head(part).flatten(0, 1), wanted.flatten(), reduction="sum") / 24
            run.figures[f"loss {step} {place}"] = loss.detach().clone()
            loss.backward()
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.set_requires_gradient_sync(True, recurse=False)
        head.reshard()
        hidden.backward(torch.cat([part.grad for part in parts if part.grad is not None], dim=1))
        run.step()
    return run


def clips_by_a_norm_of_its_own(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        run.backward()
        parameters = list(run.model.parameters())
        norm = get_total_norm([p.grad for p in parameters], 2.0, False, True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norm **= 2.0  # and summed over stages of a pipeline, of which there is one
        norm **= 0.5
        clip_grads_with_norm_(parameters, 0.5, norm, True)
        run.figures[f"{run.count} own norm"] = norm.clone()
        run.step()
    return run


def wraps_blocks_for_checkpointing(api: Api) -> Run:
    model: Any = seeded(Transformer)
    for name, block in list(model.blocks.named_children()):
        model.blocks.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
    run = Run(api, model)
    run.steps()
    return run


def wraps_sharded_blocks_for_checkpointing(api: Api) -> Run:
    model: Any = seeded(Transformer)
    for name, block in list(model.blocks.named_children()):
        model.blocks.register_module(name, checkpoint_wrapper(api.fully_shard(block)))
    run = Run.of_sharded(api, api.fully_shard(model))
    run.steps()
    return run


def compiles_each_block(api: Api) -> Run:
    torch._dynamo.reset()
    model: Any = seeded(Transformer)
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    run = Run(api, model)
    run.steps()
    return run


class Experts(nn.Module):
    """Each token through one of some linear layers, whose weights are one parameter; the choice is balanced by a bias
    that follows how many tokens each of them got."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count, bias=False)
        self.experts = Stack(count)
        self.register_buffer("bias", torch.zeros(count))
        self.register_buffer("seen", torch.zeros(count), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(self.norm(x)).sigmoid()
        chosen = (scores + self.bias).argmax(-1, keepdim=True)
        with torch.no_grad():
            self.seen += functional.one_hot(chosen, len(self.bias)).sum((0, 1, 2))
        out: Tensor = x + self.experts(x, chosen) * scores.gather(-1, chosen)
        return out


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        mask = functional.one_hot(chosen.squeeze(-1), len(self.weight)).to(x.dtype)
        return torch.einsum("blw,ewv,ble->blv", x, self.weight, mask)


def _mixture() -> Any:
    model: Any = seeded(Transformer)
    model.blocks = nn.ModuleList(nn.Sequential(Attention(WIDTH), Experts()) for _ in range(2))
    return model


def shards_experts_by_columns(api: Api) -> Run:
    """With more ranks than experts, so as not to pad; and balances them before each step."""
    model = _mixture()
    for block in model.blocks:
        experts = set(block[1].experts.parameters())
        api.fully_shard(block, shard_placement_fn=lambda p, experts=experts: Shard(1) if p in experts else None)
    run = Run.of_sharded(api, api.fully_shard(model))

    def balance(*_: Any) -> None:
        for each in (block[1] for block in model.blocks):
            dist.all_reduce(each.seen)
            each.bias += 0.01 * (each.seen.mean() - each.seen).sign()
            each.seen.zero_()

    run.optimizer.register_step_pre_hook(balance)
    run.steps()
    run.figures |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return run


def shards_experts_apart(api: Api) -> Run:
    """As a unit of their own inside of the block's, whose gradients are divided otherwise."""
    model = _mixture()
    for block in model.blocks:
        api.fully_shard(block[1].experts).set_gradient_divide_factor(2.0 * dist.get_world_size())
        block[1].experts.set_force_sum_reduction_for_comms(True)
        api.fully_shard(block)
    run = Run.of_sharded(api, api.fully_shard(model))
    run.model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[1][1].experts])
    run.model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0], model.blocks[0][1].experts])
    run.steps()
    return run


class App:
    """A ``Stateful`` of torch's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights, moments = state["model"], state["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)


def resumes_from_a_checkpoint(api: Api) -> Run:
    run, other = Run(api), Run(api, seeded(Transformer, 1))
    run.steps(1)
    with shared_folder() as folder:
        dcp.save({"app": App(run.model, run.optimizer)}, checkpoint_id=folder)
        dcp.load({"app": App(other.model, other.optimizer)}, checkpoint_id=folder)
    other.count = run.count
    other.steps(1)
    return other


@contextmanager
def shared_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield os.path.join(names[0], "checkpoint")
        dist.barrier()


def resumes_from_flat_optimizer_state(api: Api) -> Run:
    run, other = Run(api), Run(api)
    run.steps(1)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(run.model, run.optimizer, options=flat)
    other.optimizer.param_groups[0]["lr"] = 0.5
    set_optimizer_state_dict(other.model, other.optimizer, moments, options=flat)
    set_model_state_dict(other.model, get_model_state_dict(run.model))
    other.count = run.count
    other.steps(1)
    return other


def divides_tensors_too(api: Api) -> Run:
    """On four ranks: tensor parallelism of everything, and the other dimension sharded."""
    model: Any = seeded(DividedNet)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    divided(model, mesh["tp"], everything=True)
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh["dp"])
    run = Run.of_sharded(api, api.fully_shard(model, mesh=mesh["dp"]))
    for step in range(2):
        tokens = torch.randint(
            0, 66, (2, 12), generator=torch.Generator().manual_seed(10 * step + mesh["dp"].get_rank())
        )
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        run.step()
    return run


def sums_over_a_dimension_by_hand(api: Api) -> Run:
    """On four ranks: the gradients of the parts of a sequence are added up by whoever divided it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    run = Run(api, mesh=mesh["dp"])
    for _ in range(2):
        run.backward()
        for parameter in run.model.parameters():
            dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("cp"))
            parameter.grad.div_(2)
        run.step()
    return run


# -- torchtune --------------------------------------------------------------------------------------------------------


def shards_where_conditions_hold(api: Api) -> Run:
    model: Any = seeded(Transformer)
    conditions: list[Callable[[str, nn.Module], bool]] = [
        lambda name, _: name.rpartition(".")[0] == "blocks",
        lambda name, _: name in ("embed", "head"),
    ]
    for name, module in reversed(list(model.named_modules())):
        if any(holds(name, module) for holds in conditions):
            api.fully_shard(module, reshard_after_forward=True, mesh=None)
    run = Run.of_sharded(api, api.fully_shard(model, reshard_after_forward=False, mesh=None))
    run.steps()
    return run


def gathers_weights_on_rank_0(api: Api) -> Run:
    """One parameter after the other, as Accelerate's ``get_state_dict`` does, too."""
    run = Run(api)
    run.steps(1)
    for name, parameter in run.model.state_dict().items():
        if parameter.is_cpu:
            parameter = parameter.to("cpu")
        value = parameter.full_tensor() if hasattr(parameter, "_local_tensor") else parameter
        if dist.get_rank() == 0:
            run.figures[f"gathered {name}"] = value.cpu().clone()
        dist.barrier()
    return run


def carries_whole_optimizer_state(api: Api) -> Run:
    run, other = Run(api), Run(api)
    run.steps(1)
    moments = get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
    weights = get_model_state_dict(run.model, options=FULL)
    is_first = dist.get_rank() == 0
    set_model_state_dict(other.model, weights if is_first else {}, options=FROM_RANK_0)
    set_optimizer_state_dict(other.model, other.optimizer, moments if is_first else {}, options=FROM_RANK_0)
    other.count = run.count
    other.steps(1)
    return other


def steps_in_the_backward(api: Api) -> Run:
    """An optimizer for each parameter, run when its gradient is there."""
    run = Run(api)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in run.model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        run.backward()
        assert all(p.grad is None for p in run.model.parameters())
    return run


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter, which may be turned off."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base, self.is_on = linear.requires_grad_(False), True
        self.a, self.b = (
            nn.Linear(linear.in_features, rank, bias=False),
            nn.Linear(rank, linear.out_features, bias=False),
        )

    def initialize(self) -> None:
        nn.init.constant_(self.a.weight, 0.02)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + self.b(self.a(x)) if self.is_on else out


def _adapted(model: Any) -> Any:
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up = Adapted(block.qkv), Adapted(block.up)
    return model


def _adapters(model: nn.Module) -> list[Adapted]:
    return [module for module in model.modules() if isinstance(module, Adapted)]


def trains_adapters(api: Api) -> Run:
    """From the meta device: adapters are made on each rank, and the frozen weights come from rank 0."""
    weights = {
        name.replace("qkv.", "qkv.base.").replace("up.", "up.base."): value for name, value in _weights().items()
    }
    with torch.device("meta"):
        model = _adapted(Transformer())
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model)
    for adapter in _adapters(model):
        adapter.a.to_empty(device="cpu")
        adapter.b.to_empty(device="cpu")
        adapter.initialize()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, weights if dist.get_rank() == 0 else {}, options=options)
    assert not any(p.is_meta for p in model.parameters())
    run = Run.of_sharded(api, model)
    run.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run.steps()
    only = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    run.figures |= {f"saved {name}": value for name, value in get_model_state_dict(model, options=only).items()}
    return run


def _weights() -> dict[str, Any]:
    return seeded(Transformer).state_dict()


def scales_gradients_by_tokens(api: Api) -> Run:
    """Sums of losses, and gradients multiplied at the end: by ranks, over all tokens."""
    run = Run(api)
    for step in range(2):
        count = torch.tensor(0)
        for part in range(2):
            run.model.set_requires_gradient_sync(part == 1)
            batch = draw(10 * step + part, rows=1 + (dist.get_rank() + part) % 2)
            count += batch[:, 1:].numel()
            losses_of(run.model(batch), batch).sum().backward()
        dist.all_reduce(count)
        for parameter in run.model.parameters():
            parameter.grad *= torch.tensor(dist.get_world_size()) / count
        run.step()
    return run


def refers_to_the_model_without_adapters(api: Api) -> Run:
    """DPO: pairs of answers, of which each is asked twice, the second time with adapters off."""
    model = _adapted(seeded(Transformer))
    for adapter in _adapters(model):
        adapter.initialize()
    run = Run(api, model)
    run.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        chosen, rejected = draw(2 * step), draw(2 * step + 1)
        answers = [-losses_of(model(each), each).sum() for each in (chosen, rejected)]
        for adapter in _adapters(model):
            adapter.is_on = False
        with torch.no_grad():
            before = [-losses_of(model(each), each).sum() for each in (chosen, rejected)]
        for adapter in _adapters(model):
            adapter.is_on = True
        loss = -functional.logsigmoid(0.1 * ((answers[0] - answers[1]) - (before[0] - before[1])))
        run.figures[f"loss {step}"] = loss.detach().clone()
        loss.backward()
        run.step()
    return run


def learns_from_a_teacher(api: Api) -> Run:
    """Knowledge distillation: a larger frozen model, sharded as well."""
    teacher: Any = seeded(lambda: Transformer(blocks=4, width=2 * WIDTH), 1).requires_grad_(False).eval()
    for block in teacher.blocks:
        api.fully_shard(block)
    api.fully_shard(teacher)
    run = Run(api)
    for step in range(2):
        tokens = draw(step)
        with torch.no_grad():
            wanted = teacher(tokens).softmax(-1)
        loss = functional.cross_entropy(run.model(tokens).flatten(0, 1), wanted.flatten(0, 1))
        run.figures[f"loss {step}"] = loss.detach().clone()
        loss.backward()
        run.step()
    return run


# -- verl, NeMo RL, prime-rl, TRL -------------------------------------------------------------------------------------


def has_values_on_rank_0_only(api: Api) -> Run:
    """Other ranks build on the meta device; rank 0's values are broadcast."""
    weights: dict[str, Any] = {}
    if dist.get_rank() == 0:
        model: Any = seeded(Transformer)
        weights = copy.deepcopy(model.state_dict())
    else:
        with torch.device("meta"):
            model = Transformer()
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model)
    model = model.to("cpu", non_blocking=True) if dist.get_rank() == 0 else model.to_empty(device="cpu")
    set_model_state_dict(model, weights, options=FROM_RANK_0)
    run = Run.of_sharded(api, model)
    run.steps()
    return run


def wraps_embeddings_by_class(api: Api) -> Run:
    """Along whichever dimension the ranks divide; the next unit is prefetched."""

    def placement(parameter: nn.Parameter) -> Shard:
        divisible = (dim for dim, size in enumerate(parameter.shape) if size % dist.get_world_size() == 0)
        return Shard(next(divisible, 0))

    model: Any = seeded(Transformer)
    units = [module for module in model.modules() if isinstance(module, (Attention, nn.Embedding))]
    for unit in units:
        api.fully_shard(unit, shard_placement_fn=placement, reshard_after_forward=True)
    api.fully_shard(model, shard_placement_fn=placement, reshard_after_forward=True)
    for unit, after in pairwise(units):
        unit.set_modules_to_forward_prefetch([after])
    run = Run.of_sharded(api, model)
    run.steps()
    return run


def clips_by_torchs_private_functions(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        run.backward()
        parameters = list(run.model.parameters())
        norm = _get_total_norm([p.grad for p in parameters if p.grad is not None], 2.0, False, None)
        norm = norm.to("cpu", non_blocking=True)
        _clip_grads_with_norm_(parameters, 0.5, norm, None)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        run.figures[f"{run.count} own norm"] = norm.clone()
        if torch.isfinite(norm):
            run.step()
    return run


def moves_to_the_host_and_back(api: Api) -> Run:
    """Between phases, so that a rollout engine has the memory. (On CPUs nothing moves.)"""
    run = Run(api)
    for _ in range(2):
        run.steps(1)
        run.model.to("cpu", non_blocking=True)
        for group in run.optimizer.param_groups:
            for parameter in group["params"]:
                state = run.optimizer.state[parameter]
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[key] = value.to("cpu", non_blocking=True)
    run.steps(1)
    return run


def puts_weights_back(api: Api) -> Run:
    """Weights are changed for a rollout, as merged adapters do, and come back bit for bit."""
    run = Run(api)
    run.steps(1)
    kept = {name: p.data.clone().cpu() for name, p in run.model.named_parameters()}
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.data.mul_(1.5).add_(0.01)
        run.figures["changed"] = run.loss().clone()
        run.model.reshard()  # torch's root shows unsharded parameters after a forward
        for name, parameter in run.model.named_parameters():
            parameter.data.copy_(kept[name].to(parameter.device))
    run.steps(1)
    return run


def keeps_local_tensors(api: Api) -> Run:
    """Each rank's shards in host memory, and back into ``_local_tensor``."""
    run = Run(api)
    named: dict[str, Any] = dict(run.model.named_parameters())
    kept = {name: (p._local_tensor.detach().cpu().clone(), p._spec) for name, p in named.items()}
    run.steps()
    for name, parameter in run.model.named_parameters():
        local, spec = kept[name]
        assert parameter._spec.device_mesh == spec.device_mesh
        assert parameter._spec.placements == spec.placements
        with torch.no_grad():
            parameter._local_tensor.copy_(local)
    dist.barrier()
    run.steps(1)
    return run


def streams_weights_to_a_rollout(api: Api) -> Run:
    run = Run(api)
    run.steps(1)
    for name, value in run.model.state_dict().items():
        sent = value.to("cpu", non_blocking=True).to(torch.bfloat16)
        run.figures[f"sent {name}"] = sent.full_tensor() if isinstance(sent, DTensor) else sent
    for name, parameter in run.model.named_parameters():
        run.figures[f"sent {name}"] += parameter.full_tensor().detach().to(torch.bfloat16)
    run.steps(1)
    return run


def swaps_the_reference_in(api: Api) -> Run:
    """One model: the weights of the start lie in host memory, and take the place of the trained ones for a forward."""

    def local(value: Any) -> Tensor:
        found: Tensor = value.to_local() if isinstance(value, DTensor) else value
        return found

    run = Run(api)
    with torch.no_grad():
        start = {name: local(value).to("cpu", copy=True) for name, value in run.model.state_dict().items()}
    for step in range(2):
        with torch.no_grad():
            now = {name: local(value).to("cpu", copy=True) for name, value in run.model.state_dict().items()}
            for name, value in run.model.state_dict().items():
                local(value).copy_(start[name])
            run.model.eval()
            reference = run.model(draw(step)).log_softmax(-1)
            run.model.train()
            for name, value in run.model.state_dict().items():
                local(value).copy_(now[name])
        policy = run.model(draw(step)).log_softmax(-1)
        loss = (policy.exp() * (policy - reference)).sum(-1).mean() - policy[..., 0].mean()
        run.figures[f"loss {step}"] = loss.detach().clone()
        loss.backward()
        run.step()
    return run


def copies_the_reference_before_sharding(api: Api) -> Run:
    """Two models at once: the reference is a copy, on its own units; and log-probabilities of the old policy."""
    policy: Any = seeded(Transformer)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    for block in reference.blocks:
        api.fully_shard(block)
    api.fully_shard(reference)
    run = Run(api, policy)
    tokens = draw(0)
    with torch.no_grad():
        kept, old = reference(tokens).log_softmax(-1), -losses_of(policy(tokens), tokens)
    advantages = torch.linspace(-1, 1, len(old))
    for epoch in range(3):
        logits = policy(tokens)
        ratio = (-losses_of(logits, tokens) - old).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        now = logits.log_softmax(-1)
        loss = 0.05 * (now.exp() * (now - kept)).sum(-1).mean() - gain
        run.figures[f"loss {epoch}"] = loss.detach().clone()
        loss.backward()
        run.step()
    return run


def unshards_for_a_rollout(api: Api) -> Run:
    """All units are unsharded once for several forwards without gradients."""
    run = Run(api)
    for step in range(2):
        for unit in sharded_units(run.model):
            unit.unshard()
        tokens = draw(step)[:, :4]
        with torch.no_grad():
            for _ in range(3):
                tokens = torch.cat([tokens, run.model(tokens)[:, -1:].argmax(-1)], dim=1)
        for unit in sharded_units(run.model):
            unit.reshard()
        run.figures[f"answer {step}"] = tokens.double()
        losses_of(run.model(tokens), tokens).mean().backward()
        run.step()
    return run


def evaluates_in_inference_mode(api: Api) -> Run:
    run = Run(api)
    run.steps(1)  # torch's cannot train after a first forward in inference mode
    for _ in range(2):
        run.model.eval()
        with torch.inference_mode():
            found = run.loss()
        run.figures[f"evaluation {run.count}"] = torch.tensor(found.item())
        run.model.train()
        run.steps(1)
    return run


def compares_pairs(api: Api) -> Run:
    """A reward model: two forwards before one backward, of sequences of different lengths."""
    run = Run(api)
    for step in range(2):
        better, worse = run.model(draw(2 * step)), run.model(draw(2 * step + 1)[:, :7])
        loss = -functional.logsigmoid(better[:, -1].logsumexp(-1) - worse[:, -1, :9].logsumexp(-1)).mean()
        run.figures[f"loss {step}"] = loss.detach().clone()
        loss.backward()
        run.step()
    return run


# -- Accelerate, Axolotl, the Trainer of Transformers ----------------------------------------------------------------


class Rotating(Transformer):
    """With a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = super().forward(tokens)
        return out * (1 + self.angles.sum())


def returns_to_meta_and_is_filled(api: Api) -> Run:
    """Values of rank 0, of a model with an optimizer, which is given the sharded parameters."""
    model: Any = seeded(Rotating)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    places = {parameter: name for name, parameter in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    angles = copy.deepcopy(model.angles)
    names = [places[parameter] for parameter in optimizer.param_groups[0]["params"]]
    model = model.to(torch.device("meta"))
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model.embed)
    api.fully_shard([model.norm, model.head], reshard_after_forward=False)
    api.fully_shard(model)
    filled = {}
    for name, like in model.state_dict().items():
        value = state[name].detach() if dist.get_rank() == 0 else torch.empty(like.size(), dtype=like.dtype)
        dist.broadcast(value, src=0)
        filled[name] = distribute_tensor(value, like.device_mesh, like.placements).to(value.dtype).contiguous()
    model.load_state_dict(filled, assign=True)
    model.register_buffer("angles", angles, persistent=False)
    found = dict(model.named_parameters())
    optimizer.param_groups[0]["params"] = [found[name] for name in names]
    run = Run.of_sharded(api, model)
    run.optimizer = optimizer
    run.steps()
    return run


def autocasts(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.loss()
        run.figures[f"loss {run.count}"] = loss.detach().clone()
        loss.backward()
        run.step()
    return run


def schedules_rates_of_groups(api: Api) -> Run:
    """No decay of vectors, a lower rate of the embedding, a warm-up that is resumed; fused."""
    run = Run(api)
    named = list(run.model.named_parameters())
    groups = [
        {"params": [p for name, p in named if p.ndim > 1 and "embed" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for name, p in named if "embed" in name], "lr": 1e-3},
    ]
    run.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def schedule() -> torch.optim.lr_scheduler.LambdaLR:
        def rate(step: int) -> float:
            return min(1.0, (step + 1) / 2) * 0.5 * (1 + math.cos(step / 4))

        return torch.optim.lr_scheduler.LambdaLR(run.optimizer, rate)

    scheduler = schedule()
    for step in range(3):
        run.steps(1)
        scheduler.step()
        if step == 1:
            state, scheduler = scheduler.state_dict(), schedule()
            scheduler.load_state_dict(state)
        run.figures[f"rates {step}"] = torch.tensor([group["lr"] for group in run.optimizer.param_groups])
    return run


def has_two_optimizers(api: Api) -> Run:
    run = Run(api)
    named = list(run.model.named_parameters())
    optimizers = [
        torch.optim.SGD([p for name, p in named if "blocks" not in name], lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.AdamW([p for name, p in named if "blocks" in name], lr=1e-2, foreach=False),
    ]
    for _ in range(3):
        run.backward()
        run.look()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return run


def logs_what_it_trains(api: Api) -> Run:
    """Counts of parameters, and norms of each, of its gradient and of its update."""
    run = Run(api)
    parameters = dict(run.model.named_parameters())
    run.figures["count"] = torch.tensor([p.numel() for p in parameters.values()])
    assert all(isinstance(p, DTensor) and p.device_mesh.ndim == len(p.placements) == 1 for p in parameters.values())
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in parameters.items()}
        run.backward()
        for name, p in parameters.items():
            logged = [p.grad.norm(), p.grad.abs().max(), p.detach().float().pow(2).mean().sqrt(), p.grad.isnan().any()]
            run.figures[f"{run.count} of {name}"] = torch.tensor([float(each.full_tensor()) for each in logged])
        run.step()
        for name, p in parameters.items():
            update = torch.linalg.vector_norm(p.detach() - before[name])
            run.figures[f"{run.count} update of {name}"] = update.full_tensor()
    return run


# -- Lightning, NeMo Automodel, VeOmni, LLaMA-Factory ----------------------------------------------------------------


def materialises_module_by_module(api: Api) -> Run:
    """Each module that owns parameters gets memory and its own initialisation; values follow."""
    with torch.device("meta"):
        model = Transformer()
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model)
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter, std=0.02, a=-0.06, b=0.06)
            assert (parameter.abs().max() <= 0.0601).item()
    set_model_state_dict(model, _weights(), options=StateDictOptions(full_state_dict=True))
    run = Run.of_sharded(api, model)
    run.steps()
    return run


def converts_after_sharding(api: Api) -> Run:
    """``.to(dtype)`` of the sharded model, of which the optimizer was made before."""
    run = Run(api)
    run.model.to(torch.float64)
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float64}
    run.steps()
    return run


def averages_its_weights(api: Api) -> Run:
    """An exponential moving average, which weights are exchanged with for an evaluation."""
    run = Run(api)
    weights = list(run.model.parameters())
    average = [p.detach().clone() for p in weights]
    for _ in range(2):
        run.steps(1)
        with torch.no_grad():
            torch._foreach_mul_(average, 0.9)
            torch._foreach_add_(average, weights, alpha=0.1)
    kept = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with torch.no_grad():
        for parameter, mean in zip(weights, average, strict=True):
            parameter.copy_(mean)
        run.figures["evaluation"] = run.loss().clone()
        run.model.reshard()  # as above
        for name, parameter in run.model.named_parameters():
            parameter.data.copy_(kept[name])
    run.figures |= {f"average {place}": full(mean) for place, mean in enumerate(average)}
    return run


class Seeing(nn.Module):
    """A frozen encoder of images in front of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.vision.requires_grad_(False)
        self.connector = nn.Linear(64, WIDTH)
        self.language = Transformer()

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.vision(image)
        x = self.language.embed(tokens) + self.connector(seen).unsqueeze(1)
        for block in self.language.blocks:
            x = block(x)
        out: Tensor = self.language.head(self.language.norm(x))
        return out


def looks_at_images(api: Api) -> Run:
    model: Any = seeded(Seeing)
    api.fully_shard(model.vision)
    for block in model.language.blocks:
        api.fully_shard(block)
    run = Run.of_sharded(api, api.fully_shard(model))
    run.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        tokens = draw(step)
        image = torch.randn(2, 48, generator=torch.Generator().manual_seed(50 * step + dist.get_rank()))
        losses_of(model(image, tokens), tokens).mean().backward()
        run.step()
    return run


def groups_tied_modules(api: Api) -> Run:
    model: Any = seeded(lambda: Transformer(tied=True))
    api.fully_shard([model.embed, model.norm, model.head], reshard_after_forward=False)
    for block in model.blocks:
        api.fully_shard(block)
    run = Run.of_sharded(api, api.fully_shard(model))
    run.steps()
    return run


def offloads_activations(api: Api) -> Run:
    run = Run(api)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            loss = run.loss()
        loss.backward()
        run.step()
    return run


def is_one_unit(api: Api) -> Run:
    run = Run.of_sharded(api, api.fully_shard(seeded(Transformer)))
    run.steps()
    return run


def loads_module_by_module(api: Api) -> Run:
    """Each tensor of a file by itself, broadcast from rank 0; micro-batches are reduced together."""
    run = Run(api)
    state = seeded(Transformer, 3).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    for prefix, module in run.model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            set_model_state_dict(module, {name: state[f"{prefix}.{name}" if prefix else name]}, options=options)
    for part in range(2):
        for unit in sharded_units(run.model):
            unit.set_requires_gradient_sync(part == 1, recurse=False)
        run.backward()
    run.step()
    return run


def updates_on_the_host(api: Api) -> Run:
    """Gradients are taken over as they come, and copies of the parameters updated, whose local tensors are others."""
    run = Run(api)
    masters: dict[Tensor, Any] = {}
    for parameter in run.model.parameters():
        masters[parameter] = copy.copy(parameter.data.detach())
        masters[parameter]._local_tensor = parameter.data.to_local().clone()
        masters[parameter].grad = copy.copy(masters[parameter])
        masters[parameter].grad._local_tensor = torch.zeros_like(parameter.data.to_local())

    def take(parameter: Any) -> None:
        masters[parameter].grad._local_tensor.add_(parameter.grad.to_local())
        parameter.grad = None

    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    for _ in range(2):
        run.backward()
        run.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.data.to_local().copy_(master._local_tensor)
    return run


def makes_tensors_of_shards(api: Api) -> Run:
    """Of ``to_local()``, with the parameter's mesh and placements."""
    run = Run(api)
    with torch.no_grad():
        for p in run.model.parameters():
            local = p.to_local() * 0.5
            halved = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            p.copy_(halved)
            p.add_(halved)
            p.mul_(0.5)
    run.steps(1)
    return run


FRAMEWORKS: dict[str, list[Callable[[Api], Run]]] = {
    "torchtitan": [
        divides_by_tokens_of_all_ranks,
        prefetches_in_both_directions,
        computes_the_loss_in_chunks,
        clips_by_a_norm_of_its_own,
        wraps_blocks_for_checkpointing,
        wraps_sharded_blocks_for_checkpointing,
        compiles_each_block,
        groups_tied_modules,
    ],
    "checkpoints": [
        resumes_from_a_checkpoint,
        resumes_from_flat_optimizer_state,
        carries_whole_optimizer_state,
        gathers_weights_on_rank_0,
        materialises_module_by_module,
        returns_to_meta_and_is_filled,
        has_values_on_rank_0_only,
        makes_tensors_of_shards,
        loads_module_by_module,
    ],
    "torchtune": [
        shards_where_conditions_hold,
        steps_in_the_backward,
        trains_adapters,
        scales_gradients_by_tokens,
        refers_to_the_model_without_adapters,
        learns_from_a_teacher,
    ],
    "reinforcement learning": [
        wraps_embeddings_by_class,
        clips_by_torchs_private_functions,
        moves_to_the_host_and_back,
        puts_weights_back,
        keeps_local_tensors,
        streams_weights_to_a_rollout,
        swaps_the_reference_in,
        copies_the_reference_before_sharding,
        unshards_for_a_rollout,
        evaluates_in_inference_mode,
        compares_pairs,
    ],
    "others": [
        autocasts,
        schedules_rates_of_groups,
        has_two_optimizers,
        logs_what_it_trains,
        converts_after_sharding,
        averages_its_weights,
        looks_at_images,
        offloads_activations,
        is_one_unit,
        updates_on_the_host,
    ],
    "four ranks": [shards_experts_by_columns, shards_experts_apart, divides_tensors_too, sums_over_a_dimension_by_hand],
}
"""Programs that run one after another on the same ranks, of which there are two but for the last of these."""
