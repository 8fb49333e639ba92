"""Tied parameters are one, whatever a checkpoint holds under their names; and copies are not loaded into."""

import pytest
import torch

import yafsdp_cc
from tests.checkpoint.jobs import contents, job, same
from tests.ranks import ranks


def one_of_two(folder):
    untied, _ = job("ours")
    for save, load in (
        (yafsdp_cc.save, yafsdp_cc.load),
        (yafsdp_cc.save_safetensors, yafsdp_cc.load_safetensors),
    ):
        save(folder / load.__name__, untied)
        tied, optimizer = job("ours", seed=1, tied=True)
        before = contents(tied, optimizer)
        with pytest.raises(ValueError, match=r"different values for 'embed.weight' and 'head.weight', which are one"):
            load(folder / load.__name__, tied)
        same(contents(tied, optimizer), before)
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight.full_tensor())
    yafsdp_cc.save(folder / "equal", untied)
    yafsdp_cc.load(folder / "equal", tied)
    assert tied.head.weight.full_tensor().equal(untied.embed.weight.full_tensor())


def of_nan(folder):
    """A mask that two modules share, and a weight of a run that has diverged."""
    model, _ = job("ours", tied=True)
    model.register_buffer("mask", torch.tensor([0.0, float("nan")]))
    model.blocks.register_buffer("mask", model.mask)
    model.register_buffer("phases", torch.tensor([1j, complex(0.0, float("nan"))]))
    model.blocks.register_buffer("phases", model.phases)
    with torch.no_grad():
        model.embed.weight.mul_(float("nan"))
    yafsdp_cc.save(folder / "nan", model)
    yafsdp_cc.save_safetensors(folder / "nan weights", model)
    for load, path in ((yafsdp_cc.load, "nan"), (yafsdp_cc.load_safetensors, "nan weights")):
        load(folder / path, model)
        assert model.head.weight.full_tensor().isnan().all()


def into_copies(folder):
    model, _ = job("ours")
    yafsdp_cc.save(folder / "step", model)
    yafsdp_cc.save_safetensors(folder / "weights", model)
    for load, path in ((yafsdp_cc.load, "step"), (yafsdp_cc.load_safetensors, "weights")):
        with (
            yafsdp_cc.whole_parameters(model, write=True),
            pytest.raises(RuntimeError, match=f"{load.__name__} inside whole_parameters"),
        ):
            load(folder / path, model)
        load(folder / path, model)


@ranks(2)
def test_what_would_be_lost_is_refused(tmp_path):
    one_of_two(tmp_path)
    of_nan(tmp_path)
    into_copies(tmp_path)
