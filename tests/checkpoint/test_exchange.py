"""Checkpoints of this engine, of FSDP2 and of plain models, at any number of ranks, bit for bit."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

import yafsdp_cc
from tests.checkpoint.jobs import FORMS, HYBRID, contents, job, same, train, whole
from tests.ranks import on_ranks, ranks
from tests.soak import also


def saved(forms, folder, replicas=1):
    for form in forms:
        model, optimizer = job(form, steps=2, replicas=replicas)
        if form == "fsdp2":  # as its users do
            dcp.save(state_of(model, optimizer), checkpoint_id=folder / form)
        else:
            yafsdp_cc.save(folder / form, model, optimizer, step=2)
        found = contents(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{form}.pt")


def loaded(forms, folder, replicas=1, savers=FORMS):
    after = []
    for saver in savers:
        for form in forms:
            model, optimizer = job(form, seed=1, steps=1, replicas=replicas)
            if form == "fsdp2":
                dcp.load(state := state_of(model, optimizer), checkpoint_id=folder / saver)
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            else:
                extra = yafsdp_cc.load(folder / saver, model, optimizer)
                assert extra == ({} if saver == "fsdp2" else {"step": 2})
            same(contents(model, optimizer), torch.load(folder / f"{saver}.pt"))
            train(model, optimizer, 2)
            after.append(contents(model, optimizer))
        if dist.get_world_size() == 1:
            for other in after[-len(forms) :]:
                same(after[-1], other)


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), also(4, 2), (2, 1)])
def test_any_form_and_any_number_of_ranks(writers, readers, tmp_path):
    on_ranks(writers, saved, FORMS[:2], tmp_path)
    on_ranks(1, saved, FORMS[2:], tmp_path)
    on_ranks(readers, loaded, FORMS if readers == 1 else FORMS[:2], tmp_path)


@pytest.mark.parametrize(("writers", "readers"), [also((4, 2), (2, 1)), ((3, 1), (4, 2)), also((2, 2), (4, 2))])
def test_with_replicas(writers, readers, tmp_path):
    """(ranks, replicas among them)"""
    on_ranks(writers[0], saved, HYBRID, tmp_path, writers[1])
    on_ranks(readers[0], loaded, HYBRID, tmp_path, readers[1], HYBRID)


def as_once_saved(state):
    """The state with its optimizer under DDP's names, and its model under its own."""
    inner, groups = state["optimizer"]["state"], state["optimizer"]["param_groups"]
    inner = {f"module.{name}": value for name, value in inner.items()}
    groups = [{**group, "params": [f"module.{name}" for name in group["params"]]} for group in groups]
    return {"model": state["model"], "optimizer": {"state": inner, "param_groups": groups}}


@ranks(2)
def test_an_optimizer_of_ddp_has_the_names_of_the_model_inside(tmp_path):
    for kind, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1})):  # SGD has settings, and no state
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)))
        optimizer = kind(model.parameters(), **options)
        steps_of(model, optimizer, range(2))
        truth = contents(model.module, optimizer)
        yafsdp_cc.save(tmp_path / "ddp", model, optimizer)
        yafsdp_cc.save(tmp_path / "plain", model.module, optimizer)
        dcp.save(as_once_saved(state_of(model, optimizer)), checkpoint_id=tmp_path / f"{kind.__name__} once")
        for path, form in (("ddp", "plain"), ("ddp", "ours"), ("plain", "ddp"), (f"{kind.__name__} once", "ddp")):
            model = outer = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
            if form != "plain":
                outer = {"ours": yafsdp_cc.shard, "ddp": nn.parallel.DistributedDataParallel}[form](model)
            optimizer = kind(model.parameters(), **options)
            yafsdp_cc.load(tmp_path / path, outer, optimizer)
            same(contents(model, optimizer), truth)


class Wide(torch.optim.Optimizer):
    """Has moments in fp32, one of them in a list, and a mask, whatever the parameters' dtype."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad.float()
            state.setdefault("kept", torch.zeros_like(grad)).lerp_(grad, 0.1)
            state.setdefault("list", [torch.zeros_like(grad)])[0].lerp_(grad.square(), 0.001)
            state["large"] = grad > 1e-3
            parameter.sub_(state["kept"].to(parameter.dtype), alpha=0.01)


def stepped(form, kind, dtype, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)).to(dtype)
    if form != "plain":
        {"ours": yafsdp_cc.shard, "fsdp2": fully_shard}[form](model)
    optimizer = kind(model.parameters(), lr=0.01) if kind is not Wide else Wide(model.parameters())
    return model, optimizer, steps_of(model, optimizer, range(steps))


def steps_of(model, optimizer, steps):
    """Train; return all state of the optimizer, whole."""
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return tree_map_only(Tensor, whole, list(optimizer.state.values()))


@ranks(2)
def test_state_keeps_a_dtype_that_is_not_its_parameters(tmp_path):
    for form, kind in (("ours", torch.optim.NAdam), ("ours", Wide), ("fsdp2", Wide)):
        model, optimizer, _ = stepped(form, kind, torch.bfloat16, 2)
        yafsdp_cc.save(tmp_path / "step", model, optimizer)
        truth = steps_of(model, optimizer, range(2, 4))
        model, optimizer, _ = stepped(form, kind, torch.bfloat16, 0)
        yafsdp_cc.load(tmp_path / "step", model, optimizer)
        torch.testing.assert_close(steps_of(model, optimizer, range(2, 4)), truth, rtol=0, atol=0)


@ranks(1)
def test_moments_in_their_parameters_dtype_follow_it(tmp_path):
    for dtype, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        model, optimizer, _ = stepped("plain", torch.optim.AdamW, dtype, 1)
        yafsdp_cc.save(tmp_path / "step", model, optimizer)
        model, optimizer, _ = stepped("plain", torch.optim.AdamW, other, 0)
        yafsdp_cc.load(tmp_path / "step", model, optimizer)
        assert {each["exp_avg"].dtype for each in steps_of(model, optimizer, [1])} == {other}
