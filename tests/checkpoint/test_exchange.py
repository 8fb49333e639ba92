"""Checkpoints of this engine, of FSDP2 and of plain models, at any number of ranks, bit for bit."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import yafsdp_cc
from tests.checkpoint.jobs import FORMS, HYBRID, contents, job, same, train
from tests.ranks import on_ranks
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
