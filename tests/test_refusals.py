"""What cannot work is refused by name, with what to do instead, before anything is lost."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer

import yafsdp_cc
from tests.models import WIDTH, Block, stack
from tests.ranks import on_ranks, ranks
from tests.twins import refusal

REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "hook on a parameter": (
        lambda m: m[0][0].weight.register_hook(print),
        NotImplementedError,
        "'0.0.weight'.*would never",
    ),
    "another dtype": (lambda m: m.half(), RuntimeError, "'0.0.weight' is sharded.*do that before shard"),
    "a copy": (copy.deepcopy, ValueError, "copy the model before shard"),
    "a pickle": (pickle.dumps, TypeError, r"state_dict\(\) with torch.distributed.checkpoint"),
    "a shallow copy": (copy.copy, TypeError, r"cannot be pickled or copied"),
    "parts in a file": (
        lambda m: torch.save(m.state_dict(), io.BytesIO()),
        TypeError,
        "no use without the other ranks; save with yafsdp_cc.save or torch.distributed",
    ),
    "twice": (yafsdp_cc.shard, ValueError, "on a Sequential, but it is sharded already: call shard.. once.*unshard_"),
    "a hook of FSDP2's": (lambda m: m.set_all_reduce_hook(print), NotImplementedError, "pass a 2-D mesh"),
    "data of another": (lambda m: setattr(m[0][0].weight, "data", torch.ones(32, 32)), NotImplementedError, "copy_"),
    "a weight read outside of a forward": (
        lambda m: m[0][0].weight @ torch.ones(32),
        NotImplementedError,
        r"outside of a forward.*register_forward_method\(model.get_submodule\('0.0'\), name\).*on every rank$",
    ),
    "a weight read outside of its unit": (
        lambda m: _reading(m, lambda: m[3][0].weight),
        NotImplementedError,
        r"in the forward of unit '3.0' and was read outside.*name a unit that contains both",
    ),
    "a weight from before the forward": (
        lambda m: (lambda bias: _reading(m, lambda: bias[None] * torch.ones(2, 32)))(m[3][0].bias),
        NotImplementedError,
        r"'3.0.bias'.*has it from parameters\(\) or from before.*as an attribute",
    ),
    "an optimizer of rows": (
        lambda m: (_output(m).sum().backward(), torch.optim.Adafactor(m.parameters()).step()),
        NotImplementedError,
        "torch.optim.Adafactor takes means over rows and columns.*yafsdp_cc.optim.Adafactor has the arguments",
    ),
    "a copy from before it was sharded": (
        lambda m: m[0][0].weight - torch.ones(32, 32),
        NotImplementedError,
        "aten.sub with a plain tensor .*'0.0.weight'.*make copies after shard",
    ),
    "a plain gradient": (
        lambda m: (setattr(m[0][0].weight, "grad", torch.zeros(32, 32)), _output(m).sum().backward()),
        TypeError,
        "'0.0.weight'.*is a Tensor.*set it to None",
    ),
    "a second derivative": (
        lambda m: torch.autograd.grad(_output(m).sum(), m.inputs, create_graph=True),
        RuntimeError,
        "create_graph=True.*gradient penalties",
    ),
    "a model for a path": (
        lambda m: yafsdp_cc.save(m, "folder"),
        TypeError,
        r"save\(path, model\) takes the path of a folder and then a model, and was given \(FSDPSequential, str\)",
    ),
    "a backward after a change": (
        lambda m: _change(m, _output(m)).sum().backward(),
        RuntimeError,
        "'3.0' were changed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@ranks(2)
def test_refused(case: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    yafsdp_cc.shard(model)
    attempt, error, said = REFUSED[case]
    with pytest.raises(error, match=f"(?s){said}"):
        attempt(model)
    model.zero_grad()
    model[1]._forward_pre_hooks.popitem() if "outside of its unit" in case or "from before" in case else None
    model(torch.ones(2, 32)).sum().backward()  # and it still trains
    assert all(parameter.grad is not None for parameter in model.parameters())


def _reading(model: Any, read: Callable[[], Tensor]) -> None:
    model[1].register_forward_pre_hook(lambda _, inputs: (inputs[0] @ read().T,))
    _output(model)


def _output(model: nn.Module) -> Tensor:
    model.inputs = torch.ones(2, 32, requires_grad=True)
    output: Tensor = model(model.inputs)
    return output


def _change(model: nn.Module, output: Tensor) -> Tensor:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return output


MISTAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a dtype for a policy": ({"mp_policy": torch.bfloat16}, r"mp_policy takes MixedPrecisionPolicy\(param_dtype"),
    "a name for a dtype": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype="bf16")},  # type: ignore[arg-type]  # the mistake that is tested
        r"mp_policy.param_dtype takes a torch.dtype, such as torch.bfloat16; got 'bf16'",
    ),
    "a size for a mesh": ({"mesh": 2}, "mesh takes a DeviceMesh.*got 2"),
    "a number for units": ({"units": 3}, 'units takes "auto".*got 3'),
    "a word for reshard_after_forward": ({"reshard_after_forward": "no"}, "reshard_after_forward takes True.*got 'no'"),
    "a name for a parameter": ({"ignored_params": ["0.0.weight"]}, r"ignored_params\[0\] takes parameters themselves"),
    "a word of FSDP1's": (
        {"cpu_offload": True},
        "shard.. has no argument cpu_offload, .*FullyShardedDataParallel: use offload_policy=CPUOffloadPolicy",
    ),
    "a value for a function": ({"param_init_fn": 3}, "param_init_fn takes a function"),
}


@pytest.mark.parametrize("case", MISTAKEN)
@ranks(1)
def test_mistaken_arguments(case: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    arguments, said = MISTAKEN[case]
    with pytest.raises(TypeError, match=said):
        yafsdp_cc.shard(model, **arguments)
    assert not any(type(module).__name__.startswith("FSDP") for module in model.modules())


@ranks(1)
def test_meshes_that_do_not_fit() -> None:
    for names, said in (
        (None, "mesh has 3 dimensions: pass"),
        (("a", "b", "c"), r"mesh has 3 dimensions \('a', 'b', 'c'\): pass"),
        (("shard", "replicate"), "it is the second that parameters are sharded across: pass"),
    ):
        mesh = init_device_mesh("cpu", (1,) * (3 if names is None else len(names)), mesh_dim_names=names)
        with pytest.raises(ValueError, match=said):
            yafsdp_cc.shard(nn.Linear(32, 32), mesh=mesh)


@ranks(4)
def test_a_mesh_whose_columns_would_hold_different_shards() -> None:
    message = refusal(lambda: yafsdp_cc.shard(nn.Linear(32, 32), mesh=DeviceMesh("cpu", [[3, 0], [1, 2]])))
    assert "mesh [[3, 0], [1, 2]] orders the ranks of its rows differently" in message


@pytest.mark.parametrize("call", [yafsdp_cc.shard, yafsdp_cc.fully_shard])
@ranks(2)
def test_dtypes_that_cannot_be_trained_in(call: Callable[..., nn.Module]) -> None:
    wrong = {"param_dtype": (torch.int8, torch.float8_e4m3fn, torch.complex64)}
    wrong |= {"reduce_dtype": (torch.int8, torch.float8_e5m2, torch.bool), "output_dtype": (torch.int8, torch.bool)}
    for name, dtypes in wrong.items():
        for dtype in dtypes:  # one rank's mistake, and an answer on all
            policy = MixedPrecisionPolicy(**{name: dtype if dist.get_rank() else torch.bfloat16})
            message = refusal(lambda policy=policy: call(_linears(), mp_policy=policy))
            assert f"mp_policy.{name}={dtype} cannot be trained in: pass one of torch.bfloat16, " in message
    for dtype in (torch.float16, torch.float64):
        policy = MixedPrecisionPolicy(dtype, dtype, dtype)
        call(_linears(), mp_policy=policy)(torch.ones(2, 32)).sum().backward()


def _linears() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def test_a_run_that_shards_nothing_is_warned_of() -> None:
    on_ranks(1, _alone, "start more ranks")
    on_ranks(2, _alone, "the 2 ranks of this run would each train a model of their own")
    on_ranks(2, _small)


def test_bf16_on_a_processor_that_emulates_it_is_warned_of() -> None:
    for has_bf16 in (False, True):
        on_ranks(2, _in_bf16, has_bf16)


def _in_bf16(has_bf16: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with (
        mock.patch.object(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", return_value=has_bf16),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        yafsdp_cc.shard(_linears(), units=[nn.Linear], mp_policy=policy, sync_module_states=True)
    said = [str(each.message) for each in seen if "param_dtype=torch.bfloat16 on a processor" in str(each.message)]
    assert len(said) == (not has_bf16)


def _alone(said: str) -> None:
    apart = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pipeline", "data"))
    with pytest.warns(UserWarning, match=f"shard.. over one rank shards nothing: {said}"):
        yafsdp_cc.shard(nn.Linear(32, 32), units=[nn.Linear], mesh=apart["data"])
    dist.barrier()  # nothing else has made the ranks meet


def _small() -> None:
    with pytest.warns(UserWarning, match="nothing is sharded: every parameter"):
        yafsdp_cc.shard(nn.Linear(8, 8), units=[nn.Linear])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yafsdp_cc.shard(nn.Linear(32, 32), units=[nn.Linear])


@ranks(2)
def test_parameters_added_afterwards() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    yafsdp_cc.shard(model, units=[nn.Linear])
    model.append(nn.Linear(32, 4))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"'2.weight' \(and 1 more\) was added after shard.*first, then call shard"
        ):
            model(torch.ones(2, 32))
    model[2].requires_grad_(False)  # nothing to train, nothing to synchronise
    assert model(torch.ones(2, 32)).shape == (2, 4)


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"no process group and no launcher's environment.*yafsdp-cc launch"):
        yafsdp_cc.shard(nn.Linear(32, 32), units=[nn.Linear])


@ranks(2)
def test_embeddings_that_renormalise_themselves() -> None:
    model = nn.Sequential(nn.Embedding(64, 32, max_norm=1.0), nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"'0' has max_norm=1.0.*whole_parameters"):
        yafsdp_cc.shard(model, units=[nn.Linear])


@ranks(2)
def test_scripted_modules() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(torch.jit.script(nn.Linear(32, 32))))
    with pytest.raises(ValueError, match=r"'1.0' is a ScriptModule.*leave it a module of Python"):
        yafsdp_cc.shard(model, units=[model[1]])


@ranks(2)
def test_parameters_from_before_they_were_sharded() -> None:
    """A list that was made too early clips nothing and penalises nothing, which nobody would notice."""
    model = _linears()
    before = list(model.parameters())
    yafsdp_cc.shard(model, units=[nn.Linear])
    model(torch.ones(2, 32)).sum().backward()
    said = r"'0.weight' was taken from the model before it was sharded.*from model.parameters\(\) after shard"
    uses: list[Callable[[], Any]] = [
        lambda: torch.nn.utils.clip_grad_norm_(before, 1.0),
        lambda: sum(parameter.square().sum() for parameter in before),
        lambda: torch._foreach_norm(before),
        lambda: sum(parameter.numel() for parameter in before),
        lambda: torch.optim.SGD(before).zero_grad(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=said):
            use()
    assert "0.weight" in repr(before[0])


@ranks(2)
def test_gradients_and_weights_that_the_program_averages_itself() -> None:
    model = yafsdp_cc.shard(_linears(), units=[nn.Linear])
    model(torch.ones(2, 32)).sum().backward()
    weight = model[0].weight
    for tensor in (weight.grad, weight.data):
        for call in (dist.all_reduce, lambda each: dist.broadcast(each, 0)):
            with pytest.raises(NotImplementedError, match=r"c10d.*'0.weight'.*are averaged over ranks.*leave the call"):
                call(tensor)
    with pytest.raises(NotImplementedError, match="of a ZeroRedundancyOptimizer, take the optimizer it wraps"):
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True)
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    before = weight.full_tensor()
    with pytest.raises(NotImplementedError, match=r"ZeroRedundancyOptimizer divides.*'0.weight'.*torch.optim.AdamW"):
        zero.step()
    assert torch.equal(weight.full_tensor(), before)


@pytest.mark.parametrize("again", [False, True])
@ranks(2)
def test_an_optimizer_of_shards_that_are_no_more(again: bool) -> None:
    """Steps of such an optimizer would change nothing, also where the model is sharded once more."""
    model = _linears()
    yafsdp_cc.shard(model, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    yafsdp_cc.unshard_model(model)
    if again:
        yafsdp_cc.shard(model, units=[nn.Linear])
    model(torch.ones(2, 32)).sum().backward()
    with pytest.raises(RuntimeError, match=r"holds the shard of '0.weight', whose model is plain again.*anew"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


class Registered(nn.Linear):
    """A class that has a register of the classes derived from it, each under a name that it must give."""

    classes: ClassVar[list[type]] = []

    def __init_subclass__(cls, *, name: str) -> None:
        cls.classes.append(cls)


@ranks(2)
def test_the_class_of_a_sharded_module_is_in_no_register_of_its_own() -> None:
    model = nn.Sequential(Registered(32, 32), Registered(32, 32))
    yafsdp_cc.shard(model, units=[Registered])
    model(torch.ones(2, 32)).sum().backward()
    assert isinstance(model[0], Registered)
    assert not Registered.classes


@ranks(2)
def test_moving_to_where_it_is_moves_buffers_only() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(2)))
    yafsdp_cc.shard(model)
    before = list(model.parameters())
    assert model.to("cpu") is model
    assert model.to("cpu:0") is model
    assert model.float() is model
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


@ranks(2)
def test_a_second_communicator_changes_no_bit() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    models = [yafsdp_cc.shard(copy.deepcopy(plain), separate_reduce_group=separate) for separate in (False, True)]
    for _ in range(3):
        for model in models:
            model(torch.ones(2, 32)).sum().backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.grad.to_local(), other.grad.to_local())


@ranks(1)
def test_arguments_of_a_wrong_kind_are_refused_by_name() -> None:
    wrong: dict[str, Any] = {
        "units": 3,
        "mp_policy": torch.bfloat16,
        "ignored_params": ["0.inner.weight"],
        "mesh": dist.group.WORLD,
        "param_init_fn": 3,
    }
    for name, value in wrong.items():
        message = refusal(lambda: yafsdp_cc.shard(stack(), **{"units": [Block], name: value}))  # noqa: B023
        assert name in message, f"{name}: {message!r}"


@ranks(2)
def test_a_module_in_two_sharded_models_is_refused_by_name() -> None:
    one = stack()
    two = nn.Sequential(one[0].inner, nn.Linear(WIDTH, WIDTH))
    yafsdp_cc.shard(one)
    assert "0.weight" in refusal(lambda: yafsdp_cc.shard(two, units=[nn.Linear]))
