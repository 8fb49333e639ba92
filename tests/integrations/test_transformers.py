"""The Trainer trains, checkpoints, resumes and saves a model that is sharded already."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import yafsdp_cc
from tests import reference
from tests.integrations.examples import as_launched, on_example, same, whole
from tests.ranks import ranks
from yafsdp_cc.tools.report.tables import read_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'accelerate')")


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
    run = read_run(Path(ran["folder"][0]) / "metrics.jsonl")  # of two runs, the second of which resumed
    assert run.curve("loss") == [(step, ran["losses"][step - 1]) for step in (1, 2, 3, 4)]
    assert run.last("ranks") == 2
    assert min(y for key in ("forward_s", "backward_s", "optimizer_s") for _, y in run.curve(key)) > 0
    saved = transformers.LlamaForCausalLM.from_pretrained(f"{ran['folder'][0]}/whole")
    same(dict(saved.named_parameters()), plain)
    assert saved.config.architectures == ["LlamaForCausalLM"]
    assert ran["trainer"].model_wrapped is model  # nothing around it
    prompt = ran["make_data"]()[0]["input_ids"][None, :4]
    told = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = plain.eval().generate(prompt, **told)
    assert torch.equal(model.eval().generate(prompt, **told), generated)
    _check_ends(model, prompt, told, int(generated[0, 4]))
    with pytest.raises(NotImplementedError, match=r"call .full_tensor\(\)"):
        model.save_pretrained(f"{ran['folder'][0]}/parts")  # would write this rank's parts as if they were the model


def _check_ends(model: Any, prompt: torch.Tensor, told: dict[str, Any], first: int) -> None:
    """Rank 0 is done after one token, and goes on calling the model until rank 1 is."""
    rank, calls = dist.get_rank(), []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    generated = model.generate(prompt, **told | {"eos_token_id": first if rank == 0 else None})
    hook.remove()
    assert generated.shape[1] == (5 if rank == 0 else 8)
    assert len(calls) == 4


@ranks(2)
def test_evaluation_and_the_best_checkpoint(tmp_path: Path) -> None:
    as_launched()
    plain, model, data = _llama(), yafsdp_cc.shard(_llama()), _data()
    trainer = _trainer(
        model,
        data,
        output_dir=str(tmp_path),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    tokens = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(_loss(plain, tokens).item(), rel=1e-5)
    trainer.train()
    said = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    plain.load_state_dict(whole(model), strict=False)
    with torch.no_grad():  # of the weights that the ranks have loaded together
        assert _loss(plain, tokens).item() == pytest.approx(min(said), rel=1e-5)


@ranks(2)
def test_smoothed_labels_are_those_of_the_next_token() -> None:
    as_launched()
    plain, model, data = _llama(), yafsdp_cc.shard(_llama()), _data()
    trainer = _trainer(model, data, label_smoothing_factor=0.1, max_steps=1, logging_steps=1, save_strategy="no")
    trainer.train()
    tokens = torch.stack([row["input_ids"] for row in data[:8]])
    with torch.no_grad():
        logits, labels = plain(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)


@ranks(2)
def test_an_evaluation_before_and_after_training_with_a_metrics_callback(tmp_path: Path) -> None:
    from yafsdp_cc.integrations.transformers import metrics_callback

    as_launched()
    when = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "steps"}
    trainer = _trainer(yafsdp_cc.shard(_llama()), _data(), **when)
    trainer.add_callback(metrics_callback(tmp_path))
    trainer.eval_dataset = {"web": _data(), "code": _data()[:8]}
    before = trainer.evaluate()["eval_web_loss"]
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_web_loss"] < before
    assert [x for x, _ in read_run(tmp_path / "metrics.jsonl").curve("loss")] == [1]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name in ("eval_web_loss", "eval_code_loss"):
        assert [(line["event"], line["step"], line[name]) for line in lines if name in line] == [
            ("eval", 1, after[name])
        ]


@ranks(2)
def test_accumulation_reduces_each_micro_batch_or_the_last() -> None:
    from accelerate.state import AcceleratorState

    as_launched()
    each = _accumulate(True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert each == 2 * _accumulate(False)  # two micro-batches


def _accumulate(each: bool) -> int:
    plain, model, data = _llama(), yafsdp_cc.shard(_llama()), _data()
    trainer = _trainer(
        model,
        data,
        gradient_accumulation_steps=2,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": each}},
        max_steps=2,
        save_strategy="no",
    )
    trainer.train()
    _truth(plain, data, steps=2, micro=2, clip=1.0)
    same(whole(model), plain)
    return yafsdp_cc.counters_of(model).reduced_bytes


@ranks(2, timeout=60)
def test_ranks_that_generate_more_tokens_than_others_predict() -> None:
    from yafsdp_cc.integrations.transformers import accept_sharded_model

    as_launched()
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    plain = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    model = yafsdp_cc.shard(copy.deepcopy(plain))
    tokens = torch.randint(2, 32, (8, 6), generator=torch.Generator().manual_seed(1))
    told = {"max_new_tokens": 2 + 4 * dist.get_rank(), "do_sample": False}

    arguments = transformers.Seq2SeqTrainingArguments(
        use_cpu=True, per_device_eval_batch_size=4, predict_with_generate=True, report_to="none", disable_tqdm=True
    )
    trainer = accept_sharded_model(transformers.Seq2SeqTrainer(model, arguments))
    trainer.prediction_step = functools.partial(trainer.prediction_step, **told)
    trainer.predict([{"input_ids": row, "labels": row} for row in tokens])
    assert torch.equal(model.generate(tokens, **told), plain.eval().generate(tokens, **told))


@ranks(2, timeout=60)
def test_layers_that_each_rank_leaves_out_at_random_are_gathered_by_all() -> None:
    as_launched()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "mask_time_prob": 0.0}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**sizes, **convolutions, **positions, layerdrop=0.5, ctc_zero_infinity=True)
    model = yafsdp_cc.shard(transformers.Wav2Vec2ForCTC(config))
    data = [{"input_values": torch.randn(2000), "labels": torch.randint(1, 32, (5,))} for _ in range(32)]
    trainer = _trainer(model, data, max_steps=4, save_strategy="no", seed=dist.get_rank())
    assert trainer.train().global_step == 4


@ranks(2, timeout=60)
def test_compiled_units_stay_whole_graphs() -> None:
    as_launched()
    model = _llama()
    for block in model.model.layers:
        block.compile(backend="eager", fullgraph=True)
    yafsdp_cc.shard(model)
    assert _trainer(model, _data(), max_steps=2, save_strategy="no").train().global_step == 2


def _llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model: Any = transformers.LlamaForCausalLM(config)
    return model


def _data() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(128, (32, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _trainer(model: nn.Module, data: list[dict[str, torch.Tensor]], **arguments: Any) -> Any:
    from yafsdp_cc.integrations.transformers import accept_sharded_model

    common = transformers.TrainingArguments(
        use_cpu=True,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    return accept_sharded_model(transformers.Trainer(model, common, train_dataset=data, eval_dataset=data))


@ranks(2)
def test_adafactor_is_refused_by_name() -> None:
    model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = transformers.optimization.Adafactor(model.parameters())
    with pytest.raises(NotImplementedError, match=r"transformers.Adafactor takes .*d for clip_threshold"):
        optimizer.step()
