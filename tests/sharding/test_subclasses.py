"""Parameters of tensor subclasses: FSDP2's all-gather extension, and frozen bytes with a class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

import yafsdp_cc
from tests.models import WIDTH, Checkpointed, Mlp
from tests.ranks import ranks
from tests.soak import also
from tests.subclasses import (
    Bare,
    Codes,
    Float8Weight,
    Halves,
    HalvesLinear,
    LowRank,
    PackedBytes,
    PaddedWeight,
    Pair,
    RoundedLinear,
    RowScaledWeight,
    row_scale,
    tensor_scale,
)
from tests.twins import inputs, mine, numbers, refusal, same_weights, seeded, sgd, square, trains_on, whole

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def extended(model: nn.Module, kind: Callable[[Tensor], Tensor]) -> nn.Module:
    """Have the weights of all linear layers be of a tensor subclass."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


def rounded(model: nn.Module, scale_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Have all linear layers compute with rounded weights, in one process."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = RoundedLinear
            module.scale_of = scale_of
    return model


def by_blocks(apply: Callable[..., Any], model: Any, **options: Any) -> Any:
    """Apply ``fully_shard``, ours or torch's, bottom-up."""
    for block in model.blocks:
        apply(block, **options)
    return apply(model, **options)


class Forgetting(Float8Weight):
    """One that is made again without its context, and as a plain tensor."""

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        return args[0]["master"]


# All-gather extensions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world")
def test_extensions_train_as_one_process_does(world: int) -> None:
    """To the bit, also where FSDP2 raises or hangs: rows that the ranks do not divide, weights kept in few ranks."""
    cases: list[tuple[Any, Any, int, dict[str, Any]]] = [
        (Float8Weight, tensor_scale, WIDTH, {}),
        (Float8Weight, tensor_scale, 33, {"reshard_after_forward": False}),
        (RowScaledWeight, row_scale, 33, {}),
        (RowScaledWeight, row_scale, 3, {}),  # of four ranks, one has no rows
        (Forgetting, tensor_scale, 33, {}),  # sharded as one of its class
        (PaddedWeight, tensor_scale, 38, {"reshard_after_forward": world // 2}),
    ]
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        cases.append((Float8Weight, tensor_scale, WIDTH, {"mesh": mesh}))
        cases.append((RowScaledWeight, row_scale, 33, {"reshard_after_forward": 2}))
    for kind, scale_of, width, options in cases:
        for build in (Mlp, Checkpointed) if width == WIDTH else (Mlp,):
            model = by_blocks(yafsdp_cc.fully_shard, extended(seeded(partial(build, width=width)), kind), **options)
            plain = rounded(seeded(partial(build, width=width)), scale_of)
            batches = [[numbers(3, width, seed=10 * step + rank) for rank in range(world)] for step in range(2)]
            trains_on(model, plain, square, batches, within=1e-6 if "mesh" in options else 0.0)
            assert yafsdp_cc.counters_of(model).overflow_buffers == 0


@ranks(2)
def test_extensions_train_as_fsdp2_does() -> None:
    for kind, width in ((Float8Weight, WIDTH), (RowScaledWeight, WIDTH), (PaddedWeight, 33)):
        for policy in (MixedPrecisionPolicy(), BF16):
            found = []
            for apply in (yafsdp_cc.fully_shard, fsdp2):
                model = seeded(partial(Mlp, width=width))
                model.leave = nn.Linear(width, width)  # rows that the ranks divide, except where the class pads
                by_blocks(apply, extended(model, kind), mp_policy=policy)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                for step in range(3):
                    square(model, numbers(3, width, seed=10 * step + dist.get_rank())).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                values = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
                found.append({name: getattr(value, "master", value) for name, value in values.items()})
            assert all(torch.equal(value, found[1][name]) for name, value in found[0].items()), (kind, policy)


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world")
def test_what_the_extension_makes_is_gathered(world: int) -> None:
    """Float8 and no scales: half of the bytes of bf16, and what plan and counters tell is what is sent."""
    sent = {}
    for name, convert in {"float8": partial(extended, kind=Float8Weight), "bf16": lambda model: model}.items():
        model = convert(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))))
        yafsdp_cc.shard(model, units=[nn.Linear], mp_policy=BF16)
        for _ in range(2):
            before = yafsdp_cc.counters_of(model).gathered_bytes
            square(model, numbers(2, 256)).backward()
            sgd(model)[0].step()
        sent[name] = yafsdp_cc.counters_of(model).gathered_bytes - before
        communication = yafsdp_cc.plan_of(model).communication
        planned = communication.gather_forward + communication.gather_backward
        assert sent[name] == planned, name
    assert sent["float8"] <= 0.51 * sent["bf16"], sent


@ranks(2)
def test_micro_batches_and_evaluation() -> None:
    model = yafsdp_cc.shard(extended(seeded(Mlp), Float8Weight))
    plain = rounded(seeded(Mlp), tensor_scale)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        square(model, mine(inputs(step=step))).backward()
        for each in inputs(step=step):
            (square(plain, each) / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), plain.get_parameter(name).grad, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(model(numbers(2, WIDTH)), plain(numbers(2, WIDTH)))
    with torch.inference_mode():
        torch.testing.assert_close(model(numbers(2, WIDTH)), plain(numbers(2, WIDTH)))
    with yafsdp_cc.whole_parameters(model):
        assert type(model.enter.weight) is Float8Weight
        assert torch.equal(model.enter.weight.master, plain.enter.weight)
    yafsdp_cc.unshard_model(model)
    assert type(model.enter.weight) is Float8Weight
    assert isinstance(model.enter.weight, nn.Parameter)
    assert torch.equal(model.enter.weight.master, plain.enter.weight)


@ranks(2)
def test_extensions_from_the_meta_device() -> None:
    """By to_empty and reset_parameters, as FSDP2's; by ``shard`` alone; and by a state dict that is assigned."""
    plain = rounded(seeded(Mlp), tensor_scale)
    with torch.device("meta"):
        model = extended(Mlp(width=33), Float8Weight)
    by_blocks(yafsdp_cc.fully_shard, model).to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    square(model, numbers(2, 33)).backward()
    assert all(parameter.grad.full_tensor().isfinite().all() for parameter in model.parameters())
    with torch.device("meta"):
        model = extended(Mlp(), Float8Weight)
    yafsdp_cc.shard(model)
    model.load_state_dict(plain.state_dict())
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])
    with torch.device("meta"):
        model = extended(Mlp(), Float8Weight)
    by_blocks(yafsdp_cc.fully_shard, model).load_state_dict(plain.state_dict(), assign=True)
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world")
def test_extensions_in_checkpoints(world: int, tmp_path: Path) -> None:
    """Weights, optimizer state, and norms of gradients are those of the weights that are trained, fp32."""
    build = partial(Mlp, width=33)
    plain = rounded(seeded(build), tensor_scale)
    model = yafsdp_cc.shard(extended(seeded(build), Float8Weight))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]

    def step(seed: int, *pairs: Any) -> None:
        for net, optimizer in pairs:
            batches = [numbers(3, 33, seed=seed + rank) for rank in range(world)]
            if net is plain:
                torch.stack([square(net, each) for each in batches]).mean().backward()
            else:
                square(net, mine(batches)).backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            optimizer.step()
            optimizer.zero_grad()

    norms: list[Tensor] = []
    step(0, *zip((model, plain), optimizers, strict=True))
    torch.testing.assert_close(norms[0], norms[1])
    yafsdp_cc.save(tmp_path / "state", model, optimizers[0])
    full = yafsdp_cc.full_state_dict(model)
    if dist.get_rank() == 0:
        assert all(type(value) is Tensor and value.dtype == torch.float32 for value in full.values())
    again = yafsdp_cc.shard(extended(build(), Float8Weight))
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-2)
    yafsdp_cc.load(tmp_path / "state", again, resumed)
    step(100, (model, optimizers[0]), (again, resumed))
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(whole(one.detach()), whole(other.detach())), name
    if dist.get_rank() == 0:
        plain.load_state_dict(full)
    third = by_blocks(yafsdp_cc.fully_shard, extended(build(), Float8Weight))
    set_model_state_dict(third, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    set_model_state_dict(again, get_model_state_dict(third))
    third.load_state_dict(again.state_dict())
    for parameter in plain.parameters():
        dist.broadcast(parameter.data, 0)
    same_weights(third, plain)


# Classes around two tensors ------------------------------------------------------------------------------------------


class Twice(Mlp):
    """One whose blocks are called twice, or so many times, with as many outputs as inputs."""

    def __init__(self, width: int, times: int = 2) -> None:
        super().__init__(1, width)
        self.leave, self.times = nn.Linear(width, width), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            for _ in range(self.times):
                x = x + block(x)
        out: Tensor = self.leave(x)
        return out


def parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that a sharded one is made of, whole."""
    if type(tensor) is DTensor and isinstance(local := tensor.to_local(), Bare):
        # Not by FSDP2's full_tensor, which gathers both tensors at once: gloo has ended a process in that.
        group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
        rows: list[Any] = [None] * group.size()
        dist.all_gather_object(rows, (local.one, local.other), group=group)
        return [torch.cat(each) for each in zip(*rows, strict=True)]
    whole_one = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return [whole_one.one, whole_one.other] if isinstance(whole_one, Bare) else [whole_one]


@pytest.mark.parametrize("world", [2, also(4)])  # on two ranks to the bit
@ranks("world")
def test_two_tensors_train_as_in_fsdp2(world: int) -> None:
    """Values, gradients and optimizer state, to the bit on two ranks; shards of the class and plain gradients."""
    cases: list[tuple[Any, int, dict[str, Any]]] = [
        (Pair, WIDTH, {}),
        (Pair, WIDTH, {"reshard_after_forward": False, "mp_policy": BF16}),
        (Halves, 33, {}),
    ]
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        cases = [cases[-1], (Pair, WIDTH, {"mesh": mesh})]
    for kind, width, options in cases:
        times = 1 if "mp_policy" in options else 2  # FSDP2 adds what two calls bring in bf16
        found: list[list[Tensor]] = []
        norms: list[Tensor] = []
        for apply in (yafsdp_cc.fully_shard, fsdp2):
            model: Any = extended(seeded(partial(Twice, width, times)), kind.of)
            model.blocks[0][2] = nn.Linear(2 * width, width)  # plain, with gradients of the class
            by_blocks(apply, model, **options)
            # In FSDP2, foreach steps beside such a class change plain parameters twice.
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=apply is not fsdp2)
            held: list[Tensor] = []
            for step in range(4):
                square(model, numbers(3, width, seed=10 * step + dist.get_rank())).backward()
                if step % 2:  # after two micro-batches
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e3).full_tensor())
                    optimizer.step()
                    held += [whole(p.grad) for p in model.parameters()]
                    assert all(type(p.grad.to_local()) is Tensor for p in model.parameters())
                    optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                is_plain = parameter.ndim < 2 or name == "blocks.0.2.weight"
                assert type(parameter.to_local()) is (Tensor if is_plain else kind)
                held += parts(parameter.detach()) + parts(optimizer.state[parameter]["exp_avg"])
            found.append(held)
        for one, other in zip(*found, strict=True):
            within = 0 if world == 2 else 1e-5  # which of four summands are added first differs
            torch.testing.assert_close(one, other, rtol=within, atol=within, msg=f"{kind.__name__} {options}")
        torch.testing.assert_close(norms[:2], norms[2:])


@ranks(2)
def test_frozen_ones_around_two_tensors_compute_as_in_fsdp2() -> None:
    """By the extension, where there is one; else as the class itself, whose tensors have to begin alike."""
    found: list[list[Tensor]] = []
    for apply, kind in product((yafsdp_cc.fully_shard, fsdp2), (Halves, Pair)):
        model: Any = seeded(partial(Twice, WIDTH))
        kind = Bare if apply is not fsdp2 and kind is Pair else kind  # FSDP2 wants an extension
        for block in model.blocks:
            block[0].weight = nn.Parameter(kind.of(block[0].weight.detach()), requires_grad=False)
        by_blocks(apply, model)
        losses = [square(model, numbers(3, WIDTH, seed=seed + dist.get_rank())) for seed in (0, 10)]
        losses[1].backward()
        gradients = [whole(each.grad) for each in model.parameters() if each.requires_grad]
        found.append([part for loss in losses for part in parts(loss.detach())] + gradients)
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class HalvesMlp(Mlp):
    """One whose weights are ``Halves``, in one process and without a class."""

    def __init__(self, width: int) -> None:
        super().__init__(width=width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = HalvesLinear
                module.other = nn.Parameter(module.weight.detach() / 2)


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world")
def test_two_tensors_train_as_in_one_process(world: int) -> None:
    """Also where FSDP2 raises, or makes steps of other parameters twice: by loops, foreach and fused steps."""
    for width, options, way in (
        (33, {"reshard_after_forward": world // 2}, {}),
        (38, {"reshard_after_forward": False}, {"foreach": False}),
        (3, {}, {"fused": True}),  # of four ranks, one has no rows
    ):
        model = extended(seeded(partial(Mlp, width=width)), Halves.of)
        by_blocks(yafsdp_cc.fully_shard, model, **options)
        plain = seeded(partial(HalvesMlp, width))
        optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2, **way) for each in (model, plain)]
        for step in range(3):
            batches = [numbers(3, width, seed=10 * step + rank) for rank in range(world)]
            model.set_requires_gradient_sync(step > 0)
            square(model, mine(batches)).backward()
            gradients = [torch.autograd.grad(square(plain, each), list(plain.parameters())) for each in batches]
            for parameter, *each in zip(plain.parameters(), *gradients, strict=True):
                mean = torch.stack(each).sum(0) / world
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
            if step:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            for suffix, found in zip(("weight", "other"), parts(parameter.detach()), strict=False):
                truth = plain.get_parameter(name.replace("weight", suffix)).detach()
                torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6, msg=f"{name} {width}")


@ranks(2)
def test_two_tensors_in_checkpoints(tmp_path: Path) -> None:
    """Of ours, of torch's to and from FSDP2, and in full state dicts: values and optimizer state of both tensors."""
    torch.serialization.add_safe_globals([Halves])  # as torch.load asks of checkpoints that FSDP2 writes, too
    width = 33

    def fresh(apply: Any = yafsdp_cc.fully_shard) -> Any:
        return by_blocks(apply, extended(seeded(partial(Twice, width)), Halves.of))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        square(model, numbers(3, width, seed=seed + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()

    def same(one: nn.Module, other: nn.Module) -> None:
        for parameter, again in zip(one.parameters(), other.parameters(), strict=True):
            for found, truth in zip(parts(parameter.detach()), parts(again.detach()), strict=True):
                torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    models = [fresh(), fresh(fsdp2), fresh()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    ours, theirs, third = models
    step(ours, optimizers[0], 0)
    yafsdp_cc.save(tmp_path / "ours", ours, optimizers[0])
    yafsdp_cc.load(tmp_path / "ours", third, optimizers[2])
    same(third, ours)
    step(ours, optimizers[0], 10)
    dcp.save(state(ours, optimizers[0]), checkpoint_id=tmp_path / "dcp")
    for place in (1, 2):
        loaded = state(models[place], optimizers[place])
        dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
        set_state_dict(
            models[place],
            optimizers[place],
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        same(models[place], ours)
        step(models[place], optimizers[place], 20)
    step(ours, optimizers[0], 20)
    same(theirs, ours)
    same(third, ours)
    # Whole: on the first rank, from there to all, by copies and by assignments.
    full = yafsdp_cc.full_state_dict(ours)
    assert all(type(value) is (Halves if value.ndim == 2 else Tensor) for value in full.values())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    everywhere = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
    again = fresh()
    set_model_state_dict(again, dict(everywhere), options=options)
    same(again, ours)
    with torch.device("meta"):
        meta = extended(Twice(width), Halves.of)
    by_blocks(yafsdp_cc.fully_shard, meta).load_state_dict(dict(everywhere), assign=True)
    same(meta, ours)
    with yafsdp_cc.whole_parameters(ours, write=True):
        assert type(ours.enter.weight) is Halves
        assert torch.equal(ours.enter.weight.other, everywhere["enter.weight"].other)
        with torch.no_grad():
            ours.enter.weight.other.zero_()
    assert not parts(ours.enter.weight.detach())[1].any()
    plain = yafsdp_cc.unshard_model(third)
    assert type(plain.enter.weight) is Halves
    assert isinstance(plain.enter.weight, nn.Parameter)
    same(meta, again)
    assert torch.equal(plain.enter.weight.other, everywhere["enter.weight"].other)


class Half(Float8Weight):
    """One with a half of the extension: what it inherits of the other half is not to be found."""

    fsdp_pre_all_gather: Any = property()


class Forgotten(Bare):
    """One without an extension that is made again as a plain tensor."""

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Any:
        return inner["one"]


class Cut(Tensor):
    """A weight in two halves, trained, with an extension."""

    @staticmethod
    def __new__(cls, halves: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, (2 * len(halves), halves.size(1)), dtype=halves.dtype)

    def __init__(self, halves: Tensor) -> None:
        self.upper, self.lower = halves.clone(), halves.clone()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["upper", "lower"], None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...

    def fsdp_post_all_gather(self, *_: Any, **__: Any) -> Any: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


class Growing(Float8Weight):
    """One whose output grows with every all-gather."""

    calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        Growing.calls += 1
        return (torch.zeros(Growing.calls, 4),), None

    def fsdp_post_all_gather(self, outputs: Any, *_: Any, **__: Any) -> Any:
        return torch.zeros(self.size(0) * 2, self.size(1)), outputs


class Trained(nn.Parameter):
    """A class that says nothing of its own."""


REFUSED: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any], str]] = {
    "no extension": (Trained, {}, "Trained of.* and requires a gradient.*no fsdp_pre_all_gather.*requires_grad_.False"),
    "half an extension": (Half, {}, "Half, which has fsdp_post_all_gather and no fsdp_pre_all_gather"),
    "two tensors, trained": (Cut, {}, r"Cut of \[64, 32\] and requires a gradient: one around upper, lower is sharded"),
    "two tensors, no extension": (
        Bare.of,
        {},
        "Bare and requires a gradient, but its class has no fsdp_pre_all_gather",
    ),
    "two tensors, compression": (Pair.of, {"compression": "int8"}, "leave out compression"),
    "two tensors, offload": (Pair.of, {"offload_policy": CPUOffloadPolicy()}, "leave out offload_policy"),
    "not made again": (
        lambda weight: nn.Parameter(Forgotten.of(weight), requires_grad=False),
        {},
        "whose __tensor_unflatten__.* does not make one of its class again",
    ),
    "compression": (Float8Weight, {"compression": "int8"}, "leave out compression"),
    "offload": (Float8Weight, {"offload_policy": CPUOffloadPolicy()}, "leave out offload_policy"),
    "ownership": (Float8Weight, {"ownership": ["1.weight"]}, "ownership would have it whole"),
}


@pytest.mark.parametrize("case", REFUSED)
@ranks(2)
def test_refused_by_name_on_all_ranks(case: str) -> None:
    """And nothing has happened: the same model can be sharded without it."""
    kind, options, said = REFUSED[case]
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    odd = kind(model[1].weight.detach().clone())
    model[1].weight = odd if isinstance(odd, nn.Parameter) else nn.Parameter(odd)
    wrong = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) if dist.get_rank() and not options else model
    with pytest.raises(ValueError, match=rf"'1\.weight' is a tests[a-z._]+\.(\w+, .*)?{said}"):
        yafsdp_cc.shard(wrong, **options)
    assert type(model[1].weight) is type(odd)
    yafsdp_cc.shard(model, ignored_params=[model[1].weight])
    assert type(model[1].weight) is type(odd)


@ranks(2)
def test_an_extension_that_changes_its_mind_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight = nn.Parameter(Growing(model[0].weight.detach()))
    yafsdp_cc.shard(model)
    with pytest.raises(RuntimeError, match=r"fsdp_pre_all_gather of '0.weight' gave other tensors"):
        model(torch.ones(2, 32))


@ranks(2)
def test_an_extension_of_a_local_tensor_is_refused_by_name() -> None:
    """Where that is a flat range, which would never be handed to it; and so is a class that has none by then."""
    model: Any = yafsdp_cc.fully_shard(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    local = model[1].weight._local_tensor
    local.fsdp_pre_all_gather = local.fsdp_post_all_gather = lambda *_, **__: None
    with pytest.raises(ValueError, match=r"'1\.weight' was given fsdp_pre_all_gather on its local tensor"):
        model(torch.ones(2, 32))
    model = yafsdp_cc.fully_shard(extended(nn.Sequential(nn.Linear(32, 32)), Bare.of))
    with pytest.raises(ValueError, match=r"'0\.weight' is a tests.*Bare and requires a gradient.*may be given them"):
        model(torch.ones(2, 32))


class Difference(Bare):
    """One whose two tensors differ by the weight, which is gathered in bf16."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        rows = -(-size[0] // mesh.size()) - self.size(0)
        return (nn.functional.pad(self.one - self.other, (0, 0, 0, rows)).bfloat16(),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        whole_weight = outputs[0].to(dtype)
        if out is None:
            return whole_weight, (whole_weight,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole_weight[: out.size(0)])
        return None


@ranks(2)
def test_local_tensors_of_a_class_are_given_extensions() -> None:
    """As FSDP2's users do it after ``fully_shard``: to the bit as there, and as if the class had it."""
    for width, others in ((32, (Bare, fsdp2)), (33, (Difference, yafsdp_cc.fully_shard))):  # FSDP2 forgets uneven ones
        found = []
        for kind, apply in ((Bare, yafsdp_cc.fully_shard), others):
            model = extended(seeded(partial(Twice, width)), kind.of)
            by_blocks(apply, model)
            for parameter in model.parameters():
                if parameter.ndim == 2 and kind is Bare:
                    local = parameter._local_tensor
                    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
                        setattr(local, name, getattr(Difference, name).__get__(local))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            for step in range(3):
                with torch.no_grad():  # what is written past the parameter, too, is gathered
                    model(numbers(3, width))
                    model.blocks[0][0].weight.to_local().other.mul_(0.5)
                square(model, numbers(3, width, seed=10 * step + dist.get_rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([part for parameter in model.parameters() for part in parts(parameter.detach())])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), width


@ranks(2)
def test_what_takes_plain_tensors_refuses_classes_by_name(tmp_path: Path) -> None:
    model = yafsdp_cc.shard(extended(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), Pair.of))
    square(model, numbers(2, 32)).backward()
    optimizer = yafsdp_cc.optim.Adafactor(model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for act, what in {
        optimizer.step: "Adafactor",
        partial(yafsdp_cc.weight_patch, model): "weight_patch",
        partial(yafsdp_cc.save_safetensors, tmp_path / "model", model): "a safetensors file",
        partial(set_model_state_dict, model, model.state_dict(), options=options): "broadcast_from_rank0=True",
    }.items():
        with pytest.raises(
            NotImplementedError, match=rf"{what} takes plain tensors, and what .*'0\.weight'.* is a .*Pair"
        ):
            act()


# Frozen bytes --------------------------------------------------------------------------------------------------------

QUANTISED: dict[str, Callable[[Tensor], Any]] = {
    "several tensors": lambda weight: nn.Parameter(Codes.of(weight), requires_grad=False),
    "bytes": lambda weight: PackedBytes.of(weight, torch.int8),
    "bytes stored as bf16": lambda weight: PackedBytes.of(weight, torch.bfloat16),
}


def adapted(quantise: Callable[[Tensor], Any], width: int = 64) -> nn.Module:
    """Four frozen layers with adapters that are trained."""
    torch.manual_seed(0)
    return nn.Sequential(*(LowRank(quantise(torch.randn(width, width) / 8), width) for _ in range(4)))


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world")
def test_adapters_of_quantised_weights_train_as_in_one_process(world: int) -> None:
    for quantise in QUANTISED.values():
        for options in ({}, {"mp_policy": BF16}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}):
            model = adapted(quantise)
            yafsdp_cc.shard(model, units=[LowRank], **options)
            plain = adapted(quantise)
            if "mp_policy" in options:  # the bytes are no weights that would be cast
                with torch.no_grad():
                    found, truth = model(numbers(2, 64)), plain.bfloat16()(numbers(2, 64).bfloat16())
                torch.testing.assert_close(found, truth, rtol=0.02, atol=0.02)
                continue
            optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 1.0) for m in (model, plain)]
            sent = []
            for step in range(3):
                batches = [numbers(3, 64, seed=10 * step + rank) for rank in range(world)]
                before = yafsdp_cc.counters_of(model).gathered_bytes
                square(model, mine(batches)).backward()
                sent.append(yafsdp_cc.counters_of(model).gathered_bytes - before)
                torch.stack([square(plain, each) for each in batches]).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for name, parameter in plain.named_parameters():
                if parameter.requires_grad:
                    found = whole(model.get_parameter(name).detach())
                    torch.testing.assert_close(found, parameter, rtol=1e-6, atol=1e-7)
            if options.get("reshard_after_forward") is False:
                alone = adapted(quantise)
                yafsdp_cc.shard(alone, units=[LowRank], ignored_params=[layer.base for layer in alone], **options)
                square(alone, numbers(3, 64)).backward()
                assert sent[0] > sent[1] == sent[2] == yafsdp_cc.counters_of(alone).gathered_bytes


@ranks(2)
def test_quantised_weights_outside_of_forwards(tmp_path: Path) -> None:
    for name, quantise in QUANTISED.items():
        model, plain = yafsdp_cc.shard(adapted(quantise), units=[LowRank]), adapted(quantise)
        held = model[0].base
        assert held.to_local().nbytes < plain[0].base.whole().nbytes // 4
        assert held.dtype == (torch.uint8 if name == "several tensors" else plain[0].base.dtype)
        assert not held.requires_grad
        yafsdp_cc.save(tmp_path / name, model)
        with torch.no_grad():
            held.zero_()
            assert (model(numbers(2, 64)) - plain(numbers(2, 64))).abs().max() > 0.01
        yafsdp_cc.load(tmp_path / name, model)
        torch.testing.assert_close(model(numbers(2, 64)), plain(numbers(2, 64)))
        with yafsdp_cc.whole_parameters(model):
            assert type(model[0].base) is type(plain[0].base)
            assert torch.equal(model[0].base.whole(), plain[0].base.whole())
        yafsdp_cc.unshard_model(model)
        assert type(model[0].base) is type(plain[0].base)
        torch.testing.assert_close(model(numbers(2, 64)), plain(numbers(2, 64)))


@ranks(2)
def test_quantised_weights_of_the_first_rank() -> None:
    """``sync_module_states`` takes bytes and their metadata; without it ranks must have the same of both."""
    for quantise in QUANTISED.values():
        model, plain = adapted(quantise), adapted(quantise)
        if dist.get_rank():
            with torch.no_grad():
                for tensor in _metadata(model[1].base):
                    tensor.add_(1)
        assert "differ" in refusal(partial(yafsdp_cc.shard, model, units=[LowRank]))
        assert type(model[1].base) is type(plain[1].base)
        yafsdp_cc.shard(model, units=[LowRank], sync_module_states=True)
        torch.testing.assert_close(model(numbers(2, 64)), plain(numbers(2, 64)))


def _metadata(base: Any) -> list[Tensor]:
    return [base.scales] if isinstance(base, Codes) else [base.state.scales]


@ranks(2)
def test_quantised_weights_in_another_form_are_refused_by_name(tmp_path: Path) -> None:
    quantise = QUANTISED["several tensors"]
    model, plain = yafsdp_cc.shard(adapted(quantise), units=[LowRank]), adapted(quantise)
    said = refusal(partial(model.load_state_dict, plain.state_dict()))
    assert "'0.base' is sharded as the bytes of a tests.subclasses.Codes" in said, said
    assert "load it into the plain model, before shard()" in said, said
    yafsdp_cc.save(tmp_path / "model", model)
    said = refusal(partial(yafsdp_cc.load, tmp_path / "model", plain))
    assert "is a Codes here, and was saved as bytes" in said, said


def _train_once(model: nn.Module, plain: nn.Module) -> None:
    batches = [numbers(3, 64, seed=rank) for rank in range(dist.get_world_size())]
    square(model, mine(batches)).backward()
    torch.stack([square(plain, each) for each in batches]).mean().backward()
    for each in (model, plain):
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 1.0).step()


@ranks(2)
def test_nothing_encodes_or_casts_quantised_bytes(tmp_path: Path) -> None:
    compression = yafsdp_cc.Compression(gradients="int8", weights="int8")
    for quantise in QUANTISED.values():
        model, plain = adapted(quantise), adapted(quantise)
        for layer in (*model, *plain):
            nn.init.zeros_(layer.up.weight)  # the adapters are encoded
        yafsdp_cc.shard(model, units=[LowRank], compression=compression, mp_policy=MixedPrecisionPolicy())
        torch.testing.assert_close(model(numbers(2, 64)), plain(numbers(2, 64)))
        _train_once(model, plain)
        torch.testing.assert_close(model(numbers(2, 64)), plain(numbers(2, 64)), rtol=0.02, atol=0.02)
    said = refusal(partial(yafsdp_cc.save_safetensors, tmp_path / "model", model, dtype=torch.float16))
    assert "'0.base', whose torch.bfloat16 are bytes of a quantised weight" in said


@ranks(2)
def test_quantised_weights_in_host_memory() -> None:
    for quantise in QUANTISED.values():
        model, plain = adapted(quantise), adapted(quantise)
        yafsdp_cc.shard(model, units=[LowRank], offload_policy=CPUOffloadPolicy())
        _train_once(model, plain)
        torch.testing.assert_close(model(numbers(2, 64)), plain(numbers(2, 64)))
