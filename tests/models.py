"""Small models with their batches and losses: what the engine is tried on. No dropout, nothing random in forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Tensor]
WIDTH, VOCABULARY, LENGTH, ROWS = 32, 96, 12, 2


class Mlp(nn.Module):
    """Equal blocks between an input and an output layer."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks)
        )
        self.leave = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.leave(x)
        return out


class Checkpointed(Mlp):
    """The same, with every block recomputed in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.leave(x)
        return out


class Skipping(nn.Module):
    """Two layers, of which a forward may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        out: Tensor = self.first(x) if skips else self.second(self.first(x))
        return out


class Attention(nn.Module):
    """Pre-norm causal self-attention and an MLP."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """A language model whose blocks are all alike."""

    def __init__(self, blocks: int = 3, width: int = WIDTH, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class Mixture(nn.Module):
    """Top-1 routing by the first feature's range: an expert that is sent nothing is not called at all."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index in choice.unique().tolist():
            rows = (choice == index).nonzero(as_tuple=True)
            out = out.index_put(rows, weight[rows].unsqueeze(-1) * self.experts[index](x[rows]))
        return x + out


class MixtureModel(nn.Module):
    """Mixtures of experts with more experts than a rank's tokens can reach."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, experts: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture(width, experts) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Block(nn.Module):
    """A residual block around ``inner``."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def stack(blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(blocks)))


class Part(nn.Module):
    def __init__(self, recompute: bool, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recompute, self.reentrant = recompute, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            y: Tensor = checkpoint(self.mlp, x, use_reentrant=self.reentrant)
            return x + y
        return x + self.mlp(x)

    def mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = torch.tanh(self.into(x))
        if depth:
            y = self(y, depth - 1)
        return x + self.out(y)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.one = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(1))
        self.pair, self.none = nn.Parameter(torch.randn(1, 2)), nn.Parameter(torch.empty(0, 3))
        self.odd = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, :3] @ self.odd
        return torch.tanh(x * self.scalar + self.one * self.pair.sum() + y.sum() + self.none.sum())


@dataclass(frozen=True)
class Case:
    """A model, the batch of a rank at a step, and the loss of one on the other."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    gated: str = ""
    """The class of the blocks that share an input, if they do: see ``reference.gate``."""

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().train()

    def batches(self, world: int, step: int = 0) -> list[Batch]:
        """One batch per rank; every rank makes all of them, so each can compute the truth by itself."""
        return [self.batch(torch.Generator().manual_seed(1000 * step + rank)) for rank in range(world)]


def joined(batches: list[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def _features(rows: int) -> Callable[[torch.Generator], Batch]:
    def batch(random: torch.Generator) -> Batch:
        return {"x": torch.randn(rows, WIDTH, generator=random), "y": torch.randint(5, (rows,), generator=random)}

    return batch


def _tokens(random: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=random)
    return {"tokens": tokens[:, :-1].contiguous(), "next": tokens[:, 1:].contiguous()}


def _labelled(random: torch.Generator) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=random)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _translated(random: torch.Generator) -> Batch:
    source, target = torch.randint(3, VOCABULARY, (2, ROWS, LENGTH), generator=random)
    return {"input_ids": source, "labels": target}


def _pictures(random: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 16, 16, generator=random)
    return {"pixel_values": pixels, "labels": torch.randint(5, (ROWS,), generator=random)}


def classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["next"].flatten())


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss a Hugging Face model computes itself; everything is passed by keyword, as its users do."""
    loss: Tensor = model(**batch).loss
    return loss


def import_models() -> None:
    """Load the code of every model here; where there is no library of models, skip the test that asks."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    names = ("LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "ViTForImageClassification")
    for name in (*names, "BertForMaskedLM", "MixtralForCausalLM"):
        getattr(transformers, name)


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, use_cache=False, **options))


def llama(tied: bool = False) -> nn.Module:
    return _llama(tie_word_embeddings=tied)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=3, n_head=4, **still, **ends)
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    ends = {"decoder_start_token_id": 0, "use_cache": False}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, **ends))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5, **still))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **still))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, **sizes, **heads, **experts))


CASES = {
    case.name: case
    for case in (
        Case("mlp", Mlp, _features(4), classes),
        Case("transformer", Transformer, _tokens, next_token),
        Case("mixture", MixtureModel, _features(3), classes),
        Case("llama", llama, _labelled, own_loss),
        Case("llama-tied", lambda: llama(tied=True), _labelled, own_loss),
        Case("gpt2", _gpt2, _labelled, own_loss),
        Case("t5", _t5, _translated, own_loss, gated="T5Block"),
        Case("vit", _vit, _pictures, own_loss),
        Case("bert", _bert, _labelled, own_loss),
        Case("mixtral", _mixtral, _labelled, own_loss),
    )
}
