"""TRL's SFTTrainer and GRPOTrainer train a model that is sharded already."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests import reference
from tests.integrations.examples import on_example, same, whole

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed (extra 'trl')")


def test_the_example_equals_one_process() -> None:
    on_example("trl_finetune", _check)


def _check(ran: dict[str, Any]) -> None:
    plain = ran["make_model"]()
    _check_sft(ran, plain)
    _check_grpo_step(ran, plain)
    same(whole(ran["model"]), plain)
    _check_fused_head(ran)


def _check_sft(ran: dict[str, Any], plain: nn.Module) -> None:
    """Two steps before the checkpoint and two after resuming, the evaluation, and the weights that were saved."""
    rows = [[*ran["tokenizer"](row["prompt"] + row["completion"]).input_ids, 1] for row in ran["make_data"]()]
    tokens = torch.tensor(rows)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    optimizer.register_step_post_hook(lambda *_: rate.step())

    def gradients(step: int) -> tuple[float, reference.Gradients]:
        return reference.mean_gradients(plain, _completion_loss, tokens.split(2)[2 * step : 2 * step + 2])

    losses = reference.train(plain, optimizer, gradients, steps=4, clip=1.0)
    assert ran["losses"] == pytest.approx(losses, rel=1e-5)
    with torch.no_grad():
        evaluated = _completion_loss(plain, tokens).item()
    assert ran["sft"].state.log_history[-2]["eval_loss"] == pytest.approx(evaluated, rel=1e-5)
    kind: Any = type(plain)
    saved = kind.from_pretrained(f"{ran['folder'][0]}/tuned")
    same(dict(saved.named_parameters()), plain)


def _completion_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    labels = tokens.clone()
    labels[:, :2] = -100  # the prompt: a letter and a space
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def _check_grpo_step(ran: dict[str, Any], plain: nn.Module) -> None:
    """The step that GRPO's definition makes of both ranks' completions and advantages (DAPO's mean over tokens)."""
    (mine,) = ran["grpo"]._buffered_inputs
    batches: list[dict[str, Tensor]] = [{}, {}]
    dist.all_gather_object(batches, mine)
    rewards = torch.cat([_rewards(batch) for batch in batches]).view(2, 4)  # each rank has one prompt, four times
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(torch.stack([batch["advantages"].view(4) for batch in batches]), expected)
    tokens = sum(batch["completion_mask"].sum() for batch in batches)
    assert ran["grpo"].state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)  # from the reference model: no step yet
    plain.zero_grad()
    for batch in batches:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        length = batch["completion_ids"].shape[1]
        logits = plain(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
        chosen = logits.log_softmax(-1).gather(2, batch["completion_ids"][:, :, None])[:, :, 0]
        ratio = (chosen - chosen.detach()).exp()
        (-(ratio * batch["advantages"][:, None] * batch["completion_mask"]).sum() / tokens).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()


def _rewards(batch: dict[str, Tensor]) -> Tensor:
    """The example's reward: how often "a", token 2, less the length of the text, without special tokens."""
    ids = batch["completion_ids"].where(batch["completion_mask"].bool(), 0)
    written = (ids > 1) & (ids < 19)  # the others have no text
    return (ids == 2).sum(1).float() - written.sum(1)


def _check_fused_head(ran: dict[str, Any]) -> None:
    """A head in a unit of its own, whose weight TRL reads before the head would be called."""
    from trl.trainer.utils import add_fused_lm_head

    plain, model = ran["make_model"](), yafsdp_cc.shard(ran["make_model"](), units=["LlamaDecoderLayer", "lm_head"])
    add_fused_lm_head(model)
    tokens = torch.randint(2, 19, (2, 4, 12), generator=torch.Generator().manual_seed(0))
    mine = tokens[dist.get_rank()]
    model(input_ids=mine, labels=mine, fused_lm_head=True).loss.backward()
    _, gradients = reference.mean_gradients(plain, _loss, tokens)
    same({name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}, gradients)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss
