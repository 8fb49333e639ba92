"""Which modules become units. Models are built on the meta device: nothing is computed, so later tests may fork."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from yafsdp_cc.sharding import units
from yafsdp_cc.sharding.units import Division, Units, find_units


@pytest.fixture(autouse=True)
def _on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


class Block(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Language(nn.Module):
    """An embedding, blocks, a norm and a head, tied on request."""

    def __init__(self, layers: int = 3, vocabulary: int = 2000, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def blocks_of(division: Division) -> list[str]:
    return [unit.name for unit in division.units if unit.role == "block"]


def roles(division: Division) -> dict[str, str]:
    return {unit.name: unit.role for unit in division.units}


def check_complete(model: nn.Module, division: Division, ignored: int = 0) -> None:
    """Every distinct parameter is in exactly one place, in module order, with each of its sites."""
    placed = [owned for unit in division.units for owned in unit.parameters] + list(division.replicated)
    names = {owned.name: owned for owned in placed}
    assert len(names) == len(placed) == len(list(model.parameters())) - ignored
    order = [name for name, _ in model.named_parameters()]
    for owner in (*(unit.parameters for unit in division.units), division.replicated):
        indices = [order.index(owned.name) for owned in owner]
        assert indices == sorted(indices)
    for owned in placed:
        assert model.get_parameter(owned.name) is owned.parameter
        assert all(getattr(owner, attribute) is owned.parameter for owner, attribute in owned.sites)
    for unit in division.units:
        assert unit.parameters
        for owned in unit.parameters:
            assert all(any(site in set(m.modules()) for m in unit.modules) for site, _ in owned.sites)


# Models of other libraries


def hugging_face(kind: str, config: str, **settings: object) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    transformers.logging.set_verbosity_error()
    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1500,
}
BERT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 3, "num_heads": 4, "d_kv": 16, "vocab_size": 1000}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 128}

HUGGING_FACE = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, ["model.layers"], {"model.embed_tokens", "lm_head"}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"tie_word_embeddings": True}, ["model.layers"], set()),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        LLAMA | {"num_local_experts": 4},
        ["model.layers"],
        {"model.embed_tokens", "lm_head"},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, ["transformer.h"], set()),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, ["encoder.block", "decoder.block"], set()),
    "bert": ("BertForMaskedLM", "BertConfig", BERT, ["bert.encoder.layer"], set()),
    "vit": ("ViTForImageClassification", "ViTConfig", BERT | {"image_size": 32}, ["vit.layers"], set()),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_are_cut_into_their_layers(name: str) -> None:
    kind, config, settings, lists, edges = HUGGING_FACE[name]
    settings = {key: value for key, value in settings.items() if name != "vit" or key in _VIT}
    model = hugging_face(kind, config, **settings)
    division = find_units(model)
    check_complete(model, division)
    assert blocks_of(division) == [f"{place}.{index}" for place in lists for index in range(3)]
    assert {unit for unit, role in roles(division).items() if role == "edge"} == edges
    assert all("norm" not in owned.name.lower() for unit in division.units for owned in unit.parameters)


_VIT = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size"}


def test_tied_embeddings_go_to_the_root_with_every_site() -> None:
    model = hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA, tie_word_embeddings=True)
    root = find_units(model).units[-1]
    assert (root.role, root.name, root.modules) == ("root", "(root)", (model,))
    (tied,) = root.parameters
    assert tied.name == "model.embed_tokens.weight"
    assert tied.sites == (
        (model.get_submodule("model.embed_tokens"), "weight"),
        (model.get_submodule("lm_head"), "weight"),
    )


def test_the_plan_of_a_sub_model_is_read_relative_to_it() -> None:
    wrapped = nn.ModuleDict({"policy": hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA)})
    assert blocks_of(find_units(wrapped)) == [f"policy.model.layers.{index}" for index in range(3)]


def test_the_stages_a_model_names_give_way_to_their_blocks() -> None:
    swin = hugging_face("SwinModel", "SwinConfig", embed_dim=24, depths=[1, 1, 6, 1], num_heads=[1, 2, 4, 8])
    assert blocks_of(find_units(swin))[:3] == [f"encoder.layers.{stage}.blocks.0" for stage in range(3)]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_plain_transformer() -> None:
    model = nn.Transformer(64, 4, 3, 3, 128)
    division = find_units(model)
    check_complete(model, division)
    assert blocks_of(division) == [f"{half}.layers.{index}" for half in ("encoder", "decoder") for index in range(3)]


# Finding repeated blocks


def test_blocks_edges_root_and_replicated() -> None:
    model = Language()
    division = find_units(model)
    check_complete(model, division)
    assert roles(division) == {
        "embedding": "edge",
        "layers.0": "block",
        "layers.1": "block",
        "layers.2": "block",
        "head": "edge",
    }
    assert [owned.name for owned in division.units[1].parameters] == ["layers.0.mlp.0.weight", "layers.0.mlp.2.weight"]
    assert all(owned.parameter.ndim == 1 for owned in division.replicated)


def test_small_embedding_and_head_stay_with_the_root() -> None:
    assert list(roles(find_units(Language(layers=8, vocabulary=1000))))[-1] == "(root)"


def test_embedding_of_a_very_large_model_is_an_edge() -> None:
    model = Language(vocabulary=2**18)
    model.layers = nn.ModuleList(Block(2**14, 2**16) for _ in range(2))
    assert list(roles(find_units(model))) == ["embedding", "layers.0", "layers.1", "head"]


def test_members_of_a_plain_sequential_are_units() -> None:
    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    assert roles(find_units(mlp)) == {"0": "block", "2": "block", "4": "block"}


def test_nested_lists_are_looked_through() -> None:
    model = nn.Sequential(
        nn.Linear(8, 64),
        nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block())),
        nn.ModuleDict({"last": Block()}),
    )
    assert blocks_of(find_units(model)) == ["1.0.0", "1.0.1", "1.1.0", "2.last"]


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Conv2d(width // 2, width, 2)
        self.blocks = nn.Sequential(*(Block(width, 4 * width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.downsample(x))


def test_stages_of_different_size_give_way_to_their_blocks() -> None:
    model = nn.Module()
    model.stages = nn.Sequential(Stage(32, 2), Stage(64, 4), Stage(128, 2))
    assert blocks_of(find_units(model)) == [
        f"stages.{stage}.blocks.{block}" for stage, depth in enumerate((2, 4, 2)) for block in range(depth)
    ]


def test_layers_of_unlike_parts_are_not_stages() -> None:
    switch = hugging_face(
        "SwitchTransformersEncoderModel",
        "SwitchTransformersConfig",
        **T5 | {"num_sparse_encoder_layers": 2, "num_experts": 8, "num_layers": 4},
    )
    assert blocks_of(find_units(switch)) == [f"encoder.block.{index}" for index in range(4)]


class Mixture(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.attention = nn.Linear(64, 64)
        self.experts = nn.ModuleList(Block() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((expert(x) for expert in self.experts), self.attention(x))


def test_experts_are_never_units_of_their_own() -> None:
    model = nn.Sequential(*(Mixture(8) for _ in range(3)))
    assert blocks_of(find_units(model)) == ["0", "1", "2"]


def test_one_layer_called_several_times_is_one_unit() -> None:
    shared = Block()
    model = nn.Sequential(nn.Linear(16, 64), shared, shared, shared)
    with pytest.warns(UserWarning, match="unit '1' holds 96% .* Name smaller units"):
        division = find_units(model)
    check_complete(model, division)
    assert blocks_of(division) == ["1"]


def test_what_hangs_in_two_blocks_belongs_to_their_common_parent() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    model[1].mlp[0] = model[0].mlp[0]  # one module, two parents
    model[2].mlp[2].weight = model[0].mlp[2].weight  # one parameter, two owners
    division = find_units(model)
    check_complete(model, division)
    assert [owned.name for owned in division.units[-1].parameters] == ["0.mlp.0.weight", "0.mlp.2.weight"]
    assert [len(owned.sites) for owned in division.units[-1].parameters] == [1, 2]
    assert division.units[-1].role == "root"


@pytest.fixture
def no_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SMALL_MODEL", 0)


def test_a_small_model_without_blocks_is_one_unit() -> None:
    model = nn.Module()
    model.enter, model.leave = nn.Linear(64, 512), nn.Linear(512, 64)
    assert [unit.modules for unit in find_units(model).units] == [(model,)]


@pytest.mark.usefixtures("no_model_is_small")
def test_no_blocks_lists_candidates_and_what_to_type() -> None:
    model = nn.Module()
    model.first, model.second = Block(), nn.Bilinear(64, 64, 64)
    with pytest.raises(ValueError, match=r"finds no repeated blocks .* 295,(.|\n)*Bilinear") as caught:
        find_units(model)
    assert "units=['Bilinear'], or units=[model] for a single unit" in str(caught.value)
    assert "Block (x1, first): 33,216 parameters" in str(caught.value)


@pytest.mark.usefixtures("no_model_is_small")
def test_no_blocks_but_single_layers_are_candidates_too() -> None:
    model = nn.Module()
    model.enter, model.leave = nn.Linear(64, 512), nn.Linear(512, 64)
    with pytest.raises(ValueError, match=r"finds no repeated blocks") as caught:
        find_units(model)
    assert "units=['Linear'], or units=[model] for a single unit" in str(caught.value)
    assert "Candidates:\n  Linear (x2, enter, leave): 66,112 parameters" in str(caught.value)
    assert [unit.name for unit in find_units(model, ["Linear"]).units] == ["enter", "leave"]
    alone = nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"what to gather together: units=\[model\] for a single unit\.$"):
        find_units(alone)


@pytest.mark.usefixtures("no_model_is_small")
def test_one_shared_layer_of_albert_is_suggested() -> None:
    albert = hugging_face("AlbertModel", "AlbertConfig", **BERT, embedding_size=32)
    with pytest.raises(ValueError, match=r"units=\['AlbertLayer'\]"):
        find_units(albert)
    assert blocks_of(find_units(albert, "AlbertLayer")) == ["encoder.albert_layer_groups.0.albert_layers.0"]


def test_a_unit_of_most_parameters_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"unit '\(root\)' holds 72% .* Most of it is 'embedding.weight', one tensor"):
        find_units(Language(vocabulary=4000, tied=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_units(Language())
        find_units(Language(vocabulary=4000, tied=True), ["Block"])  # asked for, so not warned of


# What the caller names


@pytest.mark.parametrize(
    "units",
    [
        "Block",
        Block,
        ["Block"],
        [Block],
        [f"{__name__}.Block"],
        ["layers.*"],
        ["layers.0", "layers.1", "layers.*"],
        ["Block", Block],
        {"Block"},
        lambda name, module: isinstance(module, Block),
    ],
)
def test_ways_to_name_the_same_units(units: Units) -> None:
    assert find_units(Language(), units).units[1].name == "layers.0"
    assert blocks_of(find_units(Language(), units)) == ["layers.0", "layers.1", "layers.2"]


def test_modules_may_be_given_themselves() -> None:
    model = Language()
    assert blocks_of(find_units(model, list(model.layers))) == ["layers.0", "layers.1", "layers.2"]
    assert blocks_of(find_units(model, model.layers)) == ["layers.0", "layers.1", "layers.2"]
    assert blocks_of(find_units(model, model.layers[1])) == ["layers.1"]


def test_a_list_in_the_list_is_one_unit() -> None:
    model = Language()
    together, alone = find_units(model, [[model.layers[0], model.layers[2]], "layers.1"]).units[1:3]
    assert together.modules == (model.layers[0], model.layers[2])
    assert (together.name, len(together.parameters)) == ("layers.0", 4)
    assert alone.modules == (model.layers[1],)


def test_the_root_as_a_unit_takes_all_that_is_left() -> None:
    model = Language()
    division = find_units(model, [model])
    check_complete(model, division)
    assert roles(division) == {"(root)": "root"}
    assert roles(find_units(model, ["Block", model])) == {
        **{f"layers.{index}": "block" for index in range(3)},
        "(root)": "root",
    }


def test_a_named_head_does_not_size_the_buffers_of_the_blocks() -> None:
    model = Language()
    division = find_units(model, ["Block", [model.norm, model.head]])
    assert roles(division)["norm"] == "edge"
    assert [owned.name for owned in division.units[-1].parameters] == ["head.weight"]


def test_nested_units_take_from_the_outer_one() -> None:
    model = nn.Sequential(*(Mixture(4) for _ in range(2)))
    division = find_units(model, [Mixture, "*.experts.0"])
    check_complete(model, division)
    assert blocks_of(division) == ["0", "0.experts.0", "1", "1.experts.0"]
    assert [len(unit.parameters) for unit in division.units] == [7, 2, 7, 2]


def test_a_weight_tied_within_the_outer_unit_stays_there() -> None:
    model = nn.Sequential(Mixture(4), Mixture(4))
    model[0].experts[1].mlp[0].weight = model[0].experts[0].mlp[0].weight
    division = find_units(model, [Mixture, "*.experts.0"])
    check_complete(model, division)
    assert "0.experts.0.mlp.0.weight" in [owned.name for owned in division.units[0].parameters]


def test_ignored_parameters_go_nowhere() -> None:
    model = Language(layers=5)
    ignored = {model.embedding.weight, model.layers[0].norm.weight}
    check_complete(model, find_units(model, ignored=ignored), ignored=2)
    with pytest.raises(ValueError, match="every parameter of this model is in ignored_params"):
        find_units(model, ignored=list(model.parameters()))


def test_frozen_and_low_rank_parameters_keep_their_place() -> None:
    model = Language()
    for layer in model.layers:
        layer.mlp[0].requires_grad_(False)
        layer.adapter = nn.Linear(64, 8, bias=False)
    division = find_units(model)
    check_complete(model, division)
    assert [owned.parameter.requires_grad for owned in division.units[1].parameters] == [False, True, True]


def test_replicated_are_vectors_scalars_and_tiny_matrices() -> None:
    model = nn.Sequential(Block(), Block())
    model[0].scale = nn.Parameter(torch.empty(()))
    model[0].empty = nn.Parameter(torch.empty(0, 4))
    model[0].tiny = nn.Parameter(torch.empty(15, 17))
    model[0].matrix = nn.Parameter(torch.empty(16, 16))
    model[0].vector = nn.Parameter(torch.empty(2**20))
    model[0].long = nn.Parameter(torch.empty(2**20 + 1))
    division = find_units(model, "Block")
    check_complete(model, division)
    in_unit = {owned.name for owned in division.units[0].parameters}
    assert in_unit == {"0.matrix", "0.long", "0.mlp.0.weight", "0.mlp.2.weight"}


# Entries that cannot be meant


def test_an_entry_that_matches_nothing_gets_the_nearest_name() -> None:
    model = hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA)
    with pytest.raises(ValueError, match="LlamaDecoderLyer") as caught:
        find_units(model, ["LlamaDecoderLyer"])
    assert str(caught.value) == (
        "units='LlamaDecoderLyer' matches no module. Did you mean 'LlamaDecoderLayer' (x3, model.layers.*)?"
    )
    with pytest.raises(ValueError, match=r"Did you mean 'model.layers.\*' \(x3, model.layers.\*\)"):
        find_units(model, "layers.*")
    with pytest.raises(ValueError, match=r"'Zzz' matches no module. Repeated blocks found: LlamaDecoderLayer \(x3"):
        find_units(model, "Zzz")
    with pytest.raises(ValueError, match="units='LSTM' matches no module"):
        find_units(model, [nn.LSTM])


def test_class_names_are_case_sensitive() -> None:
    with pytest.raises(ValueError, match=r"'block' matches no module. Did you mean 'Block'"):
        find_units(Language(), "block")


def test_a_predicate_that_accepts_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"predicate accepts none of .* Repeated blocks found: Block \(x3, layers.\*\)"
    ):
        find_units(Language(), lambda name, module: False)


def test_no_entries() -> None:
    with pytest.raises(ValueError, match=r"units is empty: use units=\[model\]"):
        find_units(Language(), [])


def test_modules_of_another_model_and_duplicates() -> None:
    model = Language()
    with pytest.raises(ValueError, match=r"names a Block that is not a part of this model \(Language\)"):
        find_units(model, [Block()])
    for twice in ([model.layers[0], model.layers[0]], [[model.layers[0]] * 2], ["Block", model.layers[0]]):
        with pytest.raises(ValueError, match=r"names 'layers.0' \(Block\) twice"):
            find_units(model, twice)
    with pytest.raises(ValueError, match=r"'layers.0.mlp' is inside 'layers.0'"):
        find_units(model, [[model.layers[0], model.layers[0].mlp]])
    with pytest.raises(TypeError, match="3 is not a module"):
        find_units(model, [[3]])


def test_a_module_list_has_no_forward() -> None:
    model = Language()
    with pytest.raises(ValueError, match=r"'layers' is a ModuleList, which has no forward .* units=\['layers.\*'\]"):
        find_units(model, [model.layers])
