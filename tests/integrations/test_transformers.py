"""The Trainer trains, checkpoints, resumes and saves a model that is sharded already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import yafsdp_cc
from tests import reference
from tests.integrations.examples import as_launched, on_example, same, whole
from tests.ranks import on_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'frameworks')")


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _truth(plain: nn.Module, data: list[dict[str, torch.Tensor]], steps: int, micro: int, clip: float) -> list[float]:
    """Train ``plain`` as the Trainer does by default: AdamW, a rate that falls linearly to zero, clipping."""
    batches = torch.stack([row["input_ids"] for row in data]).split(4)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    optimizer.register_step_post_hook(lambda *_: rate.step())

    def gradients(step: int) -> tuple[float, reference.Gradients]:
        # Of equal size, so the mean over micro-batches and ranks is the mean over tokens.
        return reference.mean_gradients(plain, _loss, batches[2 * micro * step : 2 * micro * (step + 1)])

    return reference.train(plain, optimizer, gradients, steps, clip)


def test_the_example_equals_one_process() -> None:
    on_example("transformers_trainer", _check)


def _check(ran: dict[str, Any]) -> None:
    plain, model = ran["make_model"](), ran["model"]
    losses = _truth(plain, ran["make_data"](), steps=4, micro=1, clip=0.5)
    assert ran["losses"] == pytest.approx(losses, rel=1e-5)  # two before the checkpoint, two after resuming from it
    same(whole(model), plain)
    saved = transformers.LlamaForCausalLM.from_pretrained(f"{ran['folder'][0]}/whole")
    same(dict(saved.named_parameters()), plain)
    assert ran["trainer"].model_wrapped is model  # nothing around it
    prompt = ran["make_data"]()[0]["input_ids"][None, :4]
    told = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(prompt, **told), plain.eval().generate(prompt, **told))
    with pytest.raises(NotImplementedError, match=r"call .full_tensor\(\)"):
        model.save_pretrained(f"{ran['folder'][0]}/parts")  # would write this rank's parts as if they were the model


def test_accumulation_reduces_each_micro_batch_or_the_last() -> None:
    on_ranks(2, _accumulate_both_ways)


def _accumulate_both_ways() -> None:
    from accelerate.state import AcceleratorState

    as_launched()
    each = _accumulate(True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert each == 2 * _accumulate(False)  # two micro-batches


def _accumulate(each: bool) -> int:
    from yafsdp_cc.integrations.transformers import accept_sharded_model

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        model: nn.Module = transformers.LlamaForCausalLM(config)
        return model

    tokens = torch.randint(128, (32, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    model = yafsdp_cc.shard(make_model())
    arguments = transformers.TrainingArguments(
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": each}},
        max_steps=2,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    accept_sharded_model(transformers.Trainer(model, arguments, train_dataset=data)).train()
    plain = make_model()
    _truth(plain, data, steps=2, micro=2, clip=1.0)
    same(whole(model), plain)
    return yafsdp_cc.counters_of(model).reduced_bytes
