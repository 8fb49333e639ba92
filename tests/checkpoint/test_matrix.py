"""Models in every form to every form, by every way of saving: wrapped, with hooks, extra states and tied weights."""

from __future__ import annotations

import io
import multiprocessing
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import FSDPModule

import yafsdp_cc
from tests.checkpoint.jobs import same
from tests.ranks import ranks
from tests.soak import LONG
from yafsdp_cc.checkpoint.full import convert

EXTRA: list[Any] = [
    torch.arange(3),
    torch.arange(5, dtype=torch.uint8),
    7.5,
    "text",
    {"a": [1.5, {"b": torch.ones(2)}], "c": (1, 2)},
    io.BytesIO(b"bytes"),
    [torch.zeros(1), []],
]
"""Extra states of modules in forms that torch's checkpoints return as they were; then those that they do not."""
NESTED: list[Any] = [
    {},
    {1: torch.ones(2), "x": {}},
    {"a.b": torch.ones(1)},
    [{"b": {}}, io.BytesIO(b""), b""],
    {"seen": Counter(a=2)},
]


class Renamed(nn.Linear):
    """Stores its weight under another name, and its bias as a copy in fp32: a hook of either kind."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self._register_state_dict_hook(self._store)
        self.register_load_state_dict_pre_hook(self._restore)

    @staticmethod
    def _store(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight_v2"] = state.pop(f"{prefix}weight")
        state[f"{prefix}bias"] = state[f"{prefix}bias"] * 2

    @staticmethod
    def _restore(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}weight_v2")
        state[f"{prefix}bias"] = state[f"{prefix}bias"] / 2


class Extra(nn.Linear):
    """Has an extra state, which may be of another form than the one that is loaded."""

    def __init__(self) -> None:
        super().__init__(32, 32, bias=False)
        self.state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Net(nn.Module):
    def __init__(self, extras: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Sequential(Renamed(), Extra()) for _ in range(extras))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def make(form: str, extras: list[Any], seed: int) -> nn.Module:
    """A model in one of the forms, sharded, and its extra states."""
    torch.manual_seed(seed)
    model: Any = Net(len(extras))
    for block, value in zip(model.blocks, extras, strict=True):
        block[1].state = value
    for index, block in enumerate(model.blocks):
        wraps = {"blocks": [compiled], "wrapper": [checkpoint_wrapper]}.get(form, [])
        if form == "both":
            wraps = [compiled, checkpoint_wrapper][:: 1 if index % 2 else -1]
        for wrap in wraps:
            block = wrap(block)
        model.blocks[index] = block
    units = list(model.blocks)
    whole = compiled(model) if form == "whole" else model
    for unit in units:
        yafsdp_cc.fully_shard(unit)
    yafsdp_cc.fully_shard(whole)
    return compiled(whole) if form == "after" else whole


FORMS = ("plain", "whole", "after", "blocks", "wrapper", "both")


def bare(model: nn.Module) -> Any:
    """The ``Net`` in a model of any form."""
    while not isinstance(model, Net):
        model = model._orig_mod  # type: ignore[assignment]
    return model


def truth(model: nn.Module) -> dict[str, Any]:
    """The weights and extra states, whole, by place: read past all state dicts."""
    modules = [module for module in model.modules() if isinstance(module, (nn.Linear))]
    found: dict[str, Any] = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            found[f"{index}.{name}"] = parameter.detach().full_tensor()
        if isinstance(module, Extra):
            found |= flat(module.state, f"{index}.extra")
    assert bare(model).head.weight is bare(model).embed.weight
    return found


def flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, (dict, list, tuple)):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        inner = {k: leaf for key, each in items for k, leaf in flat(each, f"{name}/{key!r}").items()}
        return {name: f"{type(value).__name__} of {len(items)}", **inner}
    return {name: value.getvalue() if isinstance(value, io.BytesIO) else value}


def plain_keys(extras: list[Any]) -> list[str]:
    model = Net(len(extras))
    for block, value in zip(model.blocks, extras, strict=True):
        block[1].state = value
    return list(model.state_dict())


# Ways to save and load


def by_save(path: Path, source: nn.Module, targets: list[nn.Module]) -> None:
    yafsdp_cc.save(path, source, asynchronous=path.name.endswith("1")).result()
    for target in targets:
        yafsdp_cc.load(path, target)


def by_full(path: Path, source: nn.Module, targets: list[nn.Module]) -> None:
    held = [yafsdp_cc.full_state_dict(source)]
    if dist.get_rank() == 0:
        assert list(held[0]) == plain_keys([None] * len(bare(source).blocks))
        assert {type(value) for name, value in held[0].items() if "extra" not in name} == {Tensor}
    dist.broadcast_object_list(held)
    for target in targets:
        (target if isinstance(target, FSDPModule) else bare(target)).load_state_dict(held[0])


def by_safetensors(path: Path, source: nn.Module, targets: list[nn.Module]) -> None:
    yafsdp_cc.save_safetensors(path, source)
    for target in targets:
        yafsdp_cc.load_safetensors(path, target)


def by_convert(path: Path, source: nn.Module, targets: list[nn.Module]) -> None:
    yafsdp_cc.save(path, source)
    out = path.with_name("converted-" + path.name)
    if dist.get_rank() == 0:
        convert(path, out)
    dist.barrier()
    for target in targets:
        yafsdp_cc.load_safetensors(out, target)


def by_dcp(path: Path, source: nn.Module, targets: list[nn.Module]) -> None:
    dcp.save({"model": source.state_dict()}, checkpoint_id=path)
    _load_dcp(path, source, targets)


def _load_dcp(path: Path, source: nn.Module, targets: list[nn.Module]) -> None:
    """By torch where the names are the same; by ``load`` everywhere."""
    for target in targets:
        if target.state_dict().keys() == source.state_dict().keys():
            state = {"model": target.state_dict()}
            dcp.load(state, checkpoint_id=path)
            target.load_state_dict(state["model"])
        else:
            yafsdp_cc.load(path, target)


def staging(shared: bool, concurrent: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=False, use_shared_memory=shared, use_async_staging=concurrent, use_non_blocking_copy=False
    )


STAGERS: dict[str, tuple[AsyncCheckpointerType, Any]] = {
    "thread": (AsyncCheckpointerType.THREAD, None),
    "thread, blocking": (AsyncCheckpointerType.THREAD, BlockingAsyncStager),
    "thread, shared memory": (AsyncCheckpointerType.THREAD, lambda: DefaultStager(staging(True, True))),
    "thread, own memory": (AsyncCheckpointerType.THREAD, lambda: DefaultStager(staging(False, False))),
    "process": (AsyncCheckpointerType.PROCESS, None),
    "process, blocking": (AsyncCheckpointerType.PROCESS, BlockingAsyncStager),
    "process, shared memory": (AsyncCheckpointerType.PROCESS, lambda: DefaultStager(staging(True, False))),
    "process, own memory": (AsyncCheckpointerType.PROCESS, lambda: DefaultStager(staging(False, True))),
}


def by_stager(kind: str) -> Any:
    def way(path: Path, source: nn.Module, targets: list[nn.Module]) -> None:
        checkpointer, stager = STAGERS[kind]
        multiprocessing.current_process()._config["daemon"] = False  # or this rank may start no process
        options = {} if stager is None else {"async_stager": stager()}
        before = [parameter.detach().clone() for parameter in source.parameters()]
        response: Any = dcp.async_save(
            {"model": source.state_dict()}, checkpoint_id=path, async_checkpointer_type=checkpointer, **options
        )
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()
            response = response.upload_completion
        with torch.no_grad():
            for parameter in source.parameters():  # training goes on
                parameter.fill_(-1.0)
        response.result()
        with torch.no_grad():
            for parameter, values in zip(source.parameters(), before, strict=True):
                parameter.copy_(values)
        _load_dcp(path, source, targets)

    return way


OURS = {"save": by_save, "full": by_full, "safetensors": by_safetensors, "convert": by_convert}
TORCHS = {"dcp": by_dcp, **{kind: by_stager(kind) for kind in STAGERS}}
SHORT = {
    "save": ("both", ("plain", "after")),
    "full": ("after", ("plain", "both")),
    "safetensors": ("blocks", ("plain", "wrapper")),
    "convert": ("wrapper", ("whole",)),
    "dcp": ("blocks", ("blocks", "plain")),
    **{kind: ("plain", ("plain",)) for kind in STAGERS if kind.startswith("thread")},
}
"""Of each way in ``make test``: the form that is saved, and those that are loaded into."""


def held(way: str, source_form: str, path: Path, forms: tuple[str, ...] = FORMS) -> None:
    """Save a model in one form and load it into others."""
    extras = EXTRA + NESTED if way in OURS else EXTRA
    source = make(source_form, extras, seed=0)
    expected = truth(source)
    targets = [make(form, [None] * len(extras) if way in OURS else EXTRA, seed=1) for form in forms]
    assert not truth(targets[0])["0.weight"].equal(expected["0.weight"])
    {**OURS, **TORCHS}[way](path, source, targets)
    for form, target in zip(forms, targets, strict=True):
        try:
            same(truth(target), expected)
        except AssertionError as error:
            raise AssertionError(f"{way}: from {source_form} to {form}: {error}") from error


@ranks(2)
def test_some_forms(tmp_path):
    for index, (way, (source_form, forms)) in enumerate(SHORT.items()):
        held(way, source_form, tmp_path / str(index), forms)


@LONG
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("way", [*OURS, *TORCHS])
@ranks(2, timeout=3000)
def test_all_forms(way, tmp_path):
    for index, form in enumerate(FORMS):
        held(way, form, tmp_path / str(index))


@ranks(2)
def test_shards_go_to_another_process_but_into_no_file():
    model = make("plain", EXTRA, seed=0)
    for parameter in model.parameters():
        sent = ForkingPickler.loads(ForkingPickler.dumps(parameter.detach()))
        assert not isinstance(sent, type(parameter))
        ours, theirs = (
            [(i.index, i.tensor_data) for i in each.__create_write_items__("x", each)] for each in (parameter, sent)
        )
        assert ours == theirs
        for index, _ in ours:
            assert sent.__get_tensor_shard__(index).equal(parameter.__get_tensor_shard__(index))
        with pytest.raises(TypeError, match="a shard is no use without the other ranks"):
            torch.save(parameter, io.BytesIO())


@ranks(2)
def test_a_name_that_only_ends_like_a_wrapper_s(tmp_path):
    def net() -> nn.Module:
        model = nn.Module()
        model.my_orig_mod, model.my = nn.Linear(32, 32), nn.Linear(32, 32)
        return yafsdp_cc.fully_shard(model)

    source, target = net(), net()
    yafsdp_cc.save(tmp_path / "step", source)
    yafsdp_cc.load(tmp_path / "step", target)
    same(*({name: each.full_tensor() for name, each in model.named_parameters()} for model in (source, target)))


@ranks(2)
def test_torchs_functions_with_extra_states(tmp_path):
    """torch's own way to names without wrappers, which knows no keys that a hook has made."""

    def net(form: str, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(*[Extra() for _ in EXTRA])
        for module, value in zip(model, EXTRA, strict=True):
            module.state = value
        for index in range(len(EXTRA)) if form == "blocks" else ():
            model[index] = compiled(model[index])
        return yafsdp_cc.fully_shard(model)

    source, target = net("blocks", 0), net("plain", 1)
    dcp.save({"model": get_model_state_dict(source)}, checkpoint_id=tmp_path / "dcp")
    state = {"model": get_model_state_dict(target)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(target, state["model"])
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert one.full_tensor().equal(other.full_tensor())
