"""Forwards without gradients, between steps and inside of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import CASES, Mlp, import_models, llama
from tests.ranks import ranks
from tests.twins import inputs, means, mine, reload, same_gradients, same_weights, sgd, square, step_both, twins, whole


@pytest.fixture(scope="module", autouse=True)
def _import_before_forking() -> None:
    import_models()


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@ranks(2)
def test_evaluation_between_steps_sees_the_new_weights(mode: Any, reshard: bool | None) -> None:
    model, plain = twins(Mlp, reshard_after_forward=reshard)
    optimizers = sgd(model, plain)

    def same_output() -> None:
        model.eval()
        with mode():
            assert torch.equal(model(mine(inputs())), plain(mine(inputs())))
        model.train()

    same_output()
    for step in range(3):
        batches = inputs(step=step)
        loss = square(model, mine(batches))
        same_output()  # between forward and backward
        loss.backward()
        same_output()
        truth = means(plain, square, batches)
        same_gradients(model, truth)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)
        same_output()
        same_output()


@pytest.mark.parametrize("reshard", [None, True, False])
@ranks(2)
def test_editing_a_shard_is_seen_by_the_next_forward(reshard: bool | None) -> None:
    model, plain = twins(Mlp, reshard_after_forward=reshard)
    x = mine(inputs())
    with torch.no_grad():
        for edit in ("parameter", "local", "data"):
            model(x)
            for name, parameter in model.named_parameters():
                plain.get_parameter(name).mul_(0.5)
                target = {"parameter": parameter, "local": parameter.to_local(), "data": parameter.data}[edit]
                target.mul_(0.5)
            assert torch.equal(model(x), plain(x)), edit


@ranks(2)
def test_generate() -> None:
    model, plain = twins(llama)
    case = CASES["llama"]
    optimizers = sgd(model, plain)
    for step in range(2):
        batches = case.batches(2, step)
        case.loss(model, mine(batches)).backward()
        truth = means(plain, case.loss, batches)
        same_gradients(model, truth)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)
        prompt = mine(batches)["input_ids"][:, :4]
        told = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
        model.eval()
        plain.eval()
        assert torch.equal(model.generate(prompt, **told), plain.generate(prompt, **told))
        model.train()
        plain.train()


@ranks(2)
def test_averages_taken_in_inference_mode() -> None:
    model, plain = twins(Mlp)
    averages = [[parameter.detach().clone() for parameter in each.parameters()] for each in (model, plain)]
    for step in range(2):
        truth = means(plain, square, inputs(step=step))
        square(model, mine(inputs(step=step))).backward()
        step_both(model, plain, truth, sgd(model, plain))
        with torch.inference_mode():
            for each, average in zip((model, plain), averages, strict=True):
                for parameter, kept in zip(each.parameters(), average, strict=True):
                    kept.mul_(0.9).add_(parameter.detach(), alpha=0.1)
                    parameter.data.mul_(0.5)
    for ours, theirs in zip(*averages, strict=True):
        torch.testing.assert_close(whole(ours), theirs)
    same_weights(model, plain, within=1e-6)
