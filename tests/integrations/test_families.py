"""Hugging Face models of many families, small and random: everything that calls modules of theirs, beside a plain one.

Of each: a step of training, ``generate``, ``get_*_features`` and parts called alone, with their gradients; a checkpoint
and ``from_pretrained``. Nothing is registered, but for BLIP-2, whose methods read a weight of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import yafsdp_cc
from tests import reference
from tests.ranks import ranks
from tests.soak import also
from tests.twins import refusal, whole

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")

Batch = dict[str, Tensor]
WITHIN = 1e-5
VOCABULARY = 1100
"""Times a width of 64 it makes an embedding that is an edge, where it is not tied."""
LAYERS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {"vocab_size": VOCABULARY, **LAYERS}
GROUPED = {**DECODER, "num_key_value_heads": 2}
MASKED = {**DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {**DECODER, "max_position_embeddings": 32, "eos_token_id": 1}
VISION = {**LAYERS, "image_size": 32, "patch_size": 8}
STACKS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WIDTHS = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dropout": 0.0}
TRANSLATION = {"vocab_size": VOCABULARY, **STACKS, **WIDTHS, "max_position_embeddings": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}
OPT = {"vocab_size": VOCABULARY, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"word_embed_proj_dim": 64, "dropout": 0.0}
IMAGE = 3
"""The token that stands for an image."""


def random_of(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def text(rank: int) -> Batch:
    tokens = torch.randint(5, VOCABULARY - 10, (2, 12), generator=random_of(rank))
    return {"input_ids": tokens, "labels": tokens}


def picture(rank: int) -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=random_of(rank)), "labels": torch.tensor([rank, 5])}


def pair(rank: int) -> Batch:
    return {"input_ids": text(rank)["input_ids"], "pixel_values": picture(rank)["pixel_values"]}


def described(images: int) -> Callable[[int], Batch]:
    def batch(rank: int) -> Batch:
        tokens = torch.cat([torch.full((2, images), IMAGE), text(rank)["input_ids"]], 1)
        return {"input_ids": tokens, "labels": tokens, "pixel_values": picture(rank)["pixel_values"]}

    return batch


def sound(rank: int) -> Batch:
    frames = torch.randn(2, 16, 64, generator=random_of(rank))
    return {"input_features": frames, "labels": text(rank)["input_ids"]}


FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[int], Batch]]] = {
    "T5": ("ForConditionalGeneration", T5, text),
    "CLIP": ("Model", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 64}, pair),
    "Blip2": (
        "ForConditionalGeneration",
        {
            "vision_config": VISION,
            "qformer_config": {**MASKED, "encoder_hidden_size": 64},
            "text_config": {"model_type": "opt", **OPT},
            "num_query_tokens": 4,
            "image_token_index": IMAGE,
        },
        described(4),
    ),
    "Llama": ("ForCausalLM", GROUPED, text),
    "Mistral": ("ForCausalLM", GROUPED, text),
    "Qwen3": ("ForCausalLM", {**GROUPED, "head_dim": 16}, text),
    "Gemma2": ("ForCausalLM", {**GROUPED, "head_dim": 16}, text),
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 4}, text),
    "Falcon": ("ForCausalLM", DECODER, text),
    "GPT2": ("LMHeadModel", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, text),
    "GPTNeoX": ("ForCausalLM", DECODER, text),
    "OPT": ("ForCausalLM", OPT, text),
    "Mamba": ("ForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}, text),
    "Bert": ("ForMaskedLM", MASKED, text),
    "Roberta": ("ForMaskedLM", MASKED, text),
    "DebertaV2": ("ForMaskedLM", MASKED, text),
    "ModernBert": ("ForMaskedLM", {**DECODER, "pad_token_id": 0}, text),
    "Bart": ("ForConditionalGeneration", TRANSLATION, text),
    "Marian": ("MTModel", {**TRANSLATION, "pad_token_id": 0, "decoder_start_token_id": 0}, text),
    "Pegasus": ("ForConditionalGeneration", TRANSLATION, text),
    "Whisper": (
        "ForConditionalGeneration",
        {"vocab_size": VOCABULARY, **STACKS, **WIDTHS, "num_mel_bins": 16, "max_source_positions": 32}
        | {"max_target_positions": 48, "decoder_start_token_id": 1, "suppress_tokens": None}
        | {"begin_suppress_tokens": None, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
        sound,
    ),
    "Siglip": ("Model", {"text_config": TEXT, "vision_config": VISION}, pair),
    "Llava": (
        "ForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **DECODER},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        described(16),
    ),
    "ViT": ("ForImageClassification", {**VISION, "num_labels": 300, "hidden_dropout_prob": 0.0}, picture),
    "ConvNext": (
        "ForImageClassification",
        {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2, "num_labels": 300},
        picture,
    ),
}
QUICK = ("T5", "Blip2")


def build(family: str) -> Any:
    kind, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, family + kind)(getattr(transformers, f"{family}Config")(**sizes))
    # Zeros and ones among them would hide what is mistaken for another. Tables that are frozen are not saved.
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=random_of(parameter.numel())))
    return model.eval()


def output_of(result: Any) -> Tensor:
    names = ("logits", "logits_per_image", "pooler_output", "last_hidden_state")
    found = (getattr(result, name, None) for name in names)
    tensor = result if isinstance(result, Tensor) else next(each for each in found if each is not None)
    return torch.cat(tuple(tensor)) if isinstance(tensor, (list, tuple)) else tensor


def loss_of(call: Callable[[Any, Batch], Any]) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        result = call(model, batch)
        own: Tensor | None = getattr(result, "loss", None)
        return output_of(result).square().mean() if own is None else own

    return loss


def calls_of(plain: Any, batch: Batch) -> dict[str, Callable[[Any, Batch], Any]]:
    """What is called of a model, with gradients."""
    calls: dict[str, Callable[[Any, Batch], Any]] = {"model()": lambda model, batch: model(**batch)}
    tokens = "input_ids" in batch
    if tokens and not refusal(plain.get_input_embeddings):
        calls["embeddings"] = lambda model, batch: model.get_input_embeddings()(batch["input_ids"])
    if tokens and hasattr(plain, "lm_head") and not plain.config.is_encoder_decoder and "pixel_values" not in batch:
        calls["base and head"] = lambda model, batch: model.lm_head(model.base_model(batch["input_ids"])[0])
    if plain.config.is_encoder_decoder:
        first = next(iter(batch))
        calls["encoder"] = lambda model, batch: model.get_encoder()(batch[first])
    elif set(batch) == {"pixel_values", "labels"}:
        calls["base"] = lambda model, batch: model.base_model(batch["pixel_values"])
    if hasattr(plain, "get_image_features"):
        calls["image"] = lambda model, batch: model.get_image_features(batch["pixel_values"])
    if hasattr(plain, "get_text_features"):
        calls["text"] = lambda model, batch: model.get_text_features(batch["input_ids"])
    return calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*QUICK, *(also(name) for name in FAMILIES if name not in QUICK)])
@ranks(2)
def test_a_family(family: str, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, plain, batches = (
        yafsdp_cc.shard(build(family)),
        build(family),
        [FAMILIES[family][2](rank) for rank in (0, 1)],
    )
    batch = batches[dist.get_rank()]
    if family == "Blip2":
        for name in ("get_image_features", "generate"):
            message = refusal(lambda name=name: getattr(model, name)(batch["pixel_values"]))
            assert "register_forward_method(model, name)" in message, message
            yafsdp_cc.register_forward_method(model, name)
    for name, call in calls_of(plain, batch).items():
        model.zero_grad()
        loss_of(call)(model, batch).backward()
        truth = reference.mean_gradients(plain, loss_of(call), batches)[1]
        for key, parameter in model.named_parameters():
            found, expected = parameter.grad, truth[key]
            if expected is not None and expected.norm() > 1e-7:
                assert reference.far_apart(whole(found), expected) < WITHIN, (name, key)
        with torch.no_grad():
            assert reference.far_apart(output_of(call(model, batch)), output_of(call(plain, batch))) < WITHIN, name
    if plain.can_generate():
        prompt = {key: value for key, value in batch.items() if key != "labels"}
        told = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        for beams in (1, 2):
            assert torch.equal(
                model.generate(**prompt, **told, num_beams=beams), plain.generate(**prompt, **told, num_beams=beams)
            )
    saved(family, model, plain, tmp_path)


def saved(family: str, model: Any, plain: Any, folder: Path) -> None:
    """A checkpoint is loaded into other weights, and ``from_pretrained`` reads what was saved for it."""
    yafsdp_cc.save(folder / "checkpoint", model)
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))
    yafsdp_cc.load(folder / "checkpoint", model)
    assert "full_state_dict" in refusal(lambda: model.save_pretrained(folder / f"parts-{dist.get_rank()}"))
    full = yafsdp_cc.full_state_dict(model)
    yafsdp_cc.save_safetensors(folder / "safetensors", model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "pretrained", state_dict=full)
        for where in ("safetensors", "pretrained"):
            loaded = dict(type(plain).from_pretrained(folder / where).named_parameters())
            for name, parameter in plain.named_parameters():
                assert torch.equal(loaded[name], parameter), (where, name)


def on_meta(family: str) -> Any:
    kind, sizes, _ = FAMILIES[family]
    with torch.device("meta"):
        return getattr(transformers, family + kind)(getattr(transformers, f"{family}Config")(**sizes)).eval()


UNINITIALISED = {"CLIP": "logit_scale"}
"""What ``_init_weights`` of a family leaves out."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["Llama", *(also(name) for name in FAMILIES if name != "Llama")])
@ranks(1)
def test_a_family_on_meta(family: str) -> None:
    plain, batch = build(family), FAMILIES[family][2](0)
    state = plain.state_dict()
    unsaved = [name for name, _ in plain.named_buffers() if name not in state]

    def output(model: Any) -> Tensor:
        with torch.no_grad():
            return output_of(model(**batch))

    for left_out in (0, 3, 1):
        model = yafsdp_cc.fully_shard(on_meta(family))
        model.to_empty(device="cpu")
        given = {name: value for place, (name, value) in enumerate(state.items()) if not left_out or place % left_out}
        if given:  # torch adds what is missing to a dict that it is given
            set_model_state_dict(model, dict(given), options=StateDictOptions(full_state_dict=True, strict=False))
        missing = {*unsaved, *(state.keys() - given.keys())}
        told = refusal(lambda model=model: output(model))
        assert ("has no values" in told) is bool(missing), (left_out, told)
        if told:  # a tied one may have been given under another name
            filled = {value.data_ptr() for name, value in state.items() if name in given}
            own = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}
            assert own[told.split("'")[1]].data_ptr() not in filled, told
        with torch.no_grad():
            for name, each in (*model.named_parameters(), *model.named_buffers()):
                if name in missing:
                    each.copy_(plain.get_buffer(name) if name in unsaved else state[name])
        assert reference.far_apart(output(model), output(plain)) < WITHIN
    model = yafsdp_cc.shard(on_meta(family))
    told = refusal(lambda: output(model))
    assert (f"'{UNINITIALISED[family]}' has no values" in told) if family in UNINITIALISED else told == "", told
    for name in unsaved:
        assert torch.equal(model.get_buffer(name), plain.get_buffer(name)), name
