"""LoRA adapters train on a sharded frozen model, whose weights are gathered once where there is room to keep them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import yafsdp_cc
from tests import reference
from tests.integrations.examples import as_launched, on_example, same, whole
from tests.ranks import ranks
from tests.twins import refusal

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
peft = pytest.importorskip("peft", reason="peft is not installed (extra 'peft')")


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def test_the_example_equals_one_process() -> None:
    on_example("peft_lora", _check)


def _check(ran: dict[str, Any]) -> None:
    plain, model, tokens = ran["make_model"](), ran["model"], ran["tokens"]
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3)

    def gradients(step: int) -> tuple[float, reference.Gradients]:
        return reference.mean_gradients(plain, _loss, [tokens[2 * step], tokens[2 * step + 1]])

    losses = torch.tensor(reference.train(plain, optimizer, gradients, steps=4, clip=0.5))
    mine = torch.tensor(ran["losses"])
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / 2, losses)
    same(whole(model), plain)
    _check_bytes(model, ran["gathered"])
    prompt = {"input_ids": tokens[0][:1, :4], "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(**prompt), plain.eval().generate(**prompt))
    folder = f"{ran['folder']}/parts"
    for safe in (True, False):  # would write this rank's parts as if they were the adapters
        assert "full_state_dict(model)" in refusal(lambda s=safe: model.save_pretrained(folder, safe_serialization=s))
    full = yafsdp_cc.full_state_dict(model)
    if dist.get_rank() == 0:
        _check_saved(plain, ran)
        model.save_pretrained(ran["folder"], state_dict=full)
        _check_saved(plain, ran)


def _check_bytes(model: nn.Module, gathered: list[int]) -> None:
    """A rank sends the half that it owns of the matrices: all in the first step, those of the adapters afterwards.

    And padding: each block's weights, and its adapters, are padded to two chunks of whole blocks of a codec.
    """
    matrices = [p for p in model.parameters() if p.ndim == 2]
    first, *rest = (now - before for before, now in pairwise(gathered))
    everything, adapters = (sum(p.numel() for p in some) * 4 // 2 for some in (matrices, filter(_trained, matrices)))
    assert everything <= first < 1.01 * everything
    assert adapters <= rest[0] < 1.2 * adapters
    assert rest == rest[:1] * 3
    assert yafsdp_cc.plan_of(model).communication.gather_forward == rest[0]
    assert yafsdp_cc.counters_of(model).overflow_buffers == 0


def _trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _check_saved(plain: nn.Module, ran: dict[str, Any]) -> None:
    base = ran["make_model"]().unload()
    loaded = peft.PeftModel.from_pretrained(base, ran["folder"], is_trainable=True)
    same(dict(loaded.named_parameters()), plain)


@ranks(2)
def test_a_model_with_adapters_is_merged_before_others_read_it(tmp_path: Path) -> None:
    as_launched()
    model = _make_model()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    merged, tokens = copy.deepcopy(model).merge_and_unload(), torch.arange(8).view(1, 8)
    yafsdp_cc.shard(model, reshard_after_forward=False)
    with pytest.warns(UserWarning, match="merge_and_unload") if dist.get_rank() == 0 else nullcontext():
        yafsdp_cc.save_safetensors(tmp_path / "own", model)
    assert not (tmp_path / "own" / "config.json").exists()  # ``from_pretrained`` would draw weights by it

    plain = yafsdp_cc.unshard_model(model, rank0_only=True)  # the warning names this call
    if dist.get_rank() == 0:
        plain.merge_and_unload().save_pretrained(tmp_path / "merged")
        found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(found(tokens).logits, merged(tokens).logits)


@ranks(2)
def test_the_trainer_of_transformers_checkpoints_resumes_evaluates_and_saves_adapters(tmp_path: Path) -> None:
    from yafsdp_cc.integrations.transformers import accept_sharded_model

    pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'accelerate')")
    as_launched()
    plain, model = _make_model(), yafsdp_cc.shard(_make_model())
    tokens = torch.randint(128, (32, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=4,
        save_steps=2,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = accept_sharded_model(transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data))
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    optimizer.register_step_post_hook(lambda *_: rate.step())
    batches = tokens.split(4)

    def gradients(step: int) -> tuple[float, reference.Gradients]:
        return reference.mean_gradients(plain, _loss, batches[2 * step : 2 * step + 2])

    reference.train(plain, optimizer, gradients, steps=4, clip=1.0)
    same(whole(model), plain)
    with torch.no_grad():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(_loss(plain, tokens).item(), rel=1e-5)
    trainer.save_model(str(tmp_path / "adapters"))
    if dist.get_rank() == 0:
        _check_saved(plain, {"make_model": _make_model, "folder": str(tmp_path / "adapters")})
