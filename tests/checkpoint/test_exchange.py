"""Checkpoints of this engine, of FSDP2 and of plain models, at any number of ranks, bit for bit."""

import pytest
import torch
import torch.distributed as dist

import yafsdp_cc
from tests.checkpoint.jobs import FORMS, contents, job, same, train
from tests.ranks import on_ranks


def saved(form, folder):
    model, optimizer = job(form, steps=2)
    yafsdp_cc.save(folder, model, optimizer, step=2)
    found = contents(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(found, folder / "expected.pt")


def loaded(form, folder):
    model, optimizer = job(form, seed=1, steps=1)
    assert yafsdp_cc.load(folder, model, optimizer) == {"step": 2}
    assert same(contents(model, optimizer), torch.load(folder / "expected.pt"))
    train(model, optimizer, 2)
    found = contents(model, optimizer)
    if dist.get_world_size() == 1:
        torch.save(found, folder / f"{form}.pt")


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (4, 2), (2, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_any_form_and_any_number_of_ranks(form, writers, readers, tmp_path):
    on_ranks(1 if form == "plain" else writers, saved, form, tmp_path / "step-2")
    for other in FORMS if readers == 1 else FORMS[:2]:
        on_ranks(readers, loaded, other, tmp_path / "step-2")
    if readers == 1:
        ours, *others = (torch.load(tmp_path / "step-2" / f"{other}.pt") for other in FORMS)
        assert all(same(ours, other) for other in others)
