"""The run file: a run's settings in YAML, where each value came from, and their way into the ranks. Imports no torch.

A value is looked up in this order: the script's own arguments, the command line (torchrun's flags, ``--set a.b=c``),
the environment (torchrun's ``PET_...``, ``YAFSDP_CC_SET``), the run file, the default. ``yafsdp-cc launch`` merges all
but the script's arguments, and hands the engine's settings to the ranks as JSON in ``YAFSDP_CC_RUN``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

RUN = "YAFSDP_CC_RUN"
"""The environment variable with the settings of the engine, as JSON."""
CONFIG, SET = "YAFSDP_CC_CONFIG", "YAFSDP_CC_SET"
"""Environment variables for ``--config``, and for several ``--set`` with spaces between them."""

Scope: TypeAlias = Literal["auto", "shard", "replicate"]
_Bits: TypeAlias = Literal[
    "bf16", "fp8", "int2", "int3", "int4", "int6", "int8", "onebit", "ternary", "topk", "topk2bit"
]  # fmt: skip
Codec: TypeAlias = Literal["auto", "fp32", "powersgd", _Bits]
WeightCodec: TypeAlias = Literal["int8", "fp8", "int6", "int4", "int3", "int2", "ternary", "onebit"]
Dtype: TypeAlias = Literal["fp32", "bf16", "fp16", "fp64"]
Block: TypeAlias = Literal[64, 128, 256, 512, 1024, 2048, 4096]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


def _in_order(nodes: str) -> str:
    least, _, most = nodes.partition(":")
    if most and int(least) > int(most):
        raise ValueError(f"{nodes}: the first number is the smaller one")
    return nodes


Nodes: TypeAlias = Annotated[str, Field(pattern=r"^0*[1-9]\d*(:\d+)?$", examples=["2:4"]), AfterValidator(_in_order)]


class LaunchSection(BaseModel):
    """Where ranks run: torchrun's options of the same names, and where their output is kept."""

    model_config = _STRICT

    nproc_per_node: Positive | Literal["auto", "gpu", "cpu", "xpu"] = 1
    """Number of ranks on each machine: one for each GPU, or a few that share the cores."""
    nnodes: Positive | Nodes = 1
    """Number of machines, or MIN:MAX where machines may come and go; under Slurm that of srun."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """Number of this machine, from 0; under Slurm that of srun. Better given as --node-rank: all share the file."""
    master_addr: Text = "127.0.0.1"
    """Name or address of machine 0; under Slurm the first machine of the job step."""
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on machine 0 where the machines meet; null: 29500, or any free one for a single machine."""
    rdzv_backend: Literal["static", "c10d", "etcd", "etcd-v2"] = "static"
    """How machines find each other: static counts them by node_rank, c10d lets them join at rdzv_endpoint."""
    rdzv_endpoint: str = ""
    """HOST:PORT of the rendezvous where machines meet with c10d or etcd."""
    rdzv_id: Text = "none"
    """Name of the job at the rendezvous, the same on every machine."""
    rdzv_conf: Annotated[str, Field(pattern=r"^(\w+=[^,]+(,\w+=[^,]+)*)?$", examples=["join_timeout=600"])] = ""
    """Further options of the rendezvous, as key=value,key=value."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How many times all ranks are started again when one fails; the script then resumes from its checkpoint."""
    start_method: Literal["spawn", "fork"] = "spawn"
    """How ranks start: fork takes no seconds of imports, as one process has imported torch for all; what torch reads at
    its import, such as OMP_NUM_THREADS, a script cannot change then."""
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] | None = None
    """Name of the run, and of its folder under runs/; null: the name of the script."""
    log_dir: Text | None = None
    """Folder for the output of each rank, rank-N.log; null: runs/NAME/logs."""


class ShardSection(BaseModel):
    """Arguments of ``yafsdp_cc.shard`` that the script leaves out; ``fully_shard`` refuses those that it lacks."""

    model_config = _STRICT

    zero_stage: Annotated[int, Field(ge=1, le=3)] = 3
    """ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 parameters too. Lower stages: faster, more memory."""
    replicate: Positive = 1
    """Number of replicas (HSDP): the ranks of one replica, such as those of a machine, hold a whole model together."""
    units: Text | Annotated[list[Text], Field(min_length=1)] = "auto"
    """Modules that are gathered together: class names or patterns of module names; auto finds the repeated blocks."""
    ownership: Literal["flat", "matrix"] | Annotated[list[Text], Field(min_length=1)] = "flat"
    """What ranks own of a parameter: flat, a range of its elements; matrix, whole matrices of the blocks, for Muon; or
    patterns of the names of parameters that lie whole on one rank. Not with fully_shard."""
    sync: Literal["overlap"] | None = None
    """How replicas are kept together: overlap, by sums that are hidden behind the next step; null: by a sum in every
    backward. Not with fully_shard."""
    reshard_after_forward: bool | Positive | None = None
    """Whether the forward drops unsharded weights: false keeps them until they change; a number reshards them across
    so many neighbouring ranks."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state are in host memory (torch's CPUOffloadPolicy)."""
    sync_module_states: bool = False
    """Whether all ranks take rank 0's weights; otherwise the ranks' weights are compared."""
    separate_reduce_group: bool = False
    """Whether gradients have a communicator of their own, so that a gather and a reduce overlap."""

    @model_validator(mode="after")
    def _fit_together(self) -> ShardSection:
        if self.zero_stage < 3 and self.reshard_after_forward not in (None, False):
            raise ValueError(
                f"zero_stage {self.zero_stage} keeps weights whole, and reshard_after_forward does not: leave one out"
            )
        return self


class PrecisionSection(BaseModel):
    """Dtypes, as of torch's ``MixedPrecisionPolicy``; null: that of the parameters."""

    model_config = _STRICT

    param: Dtype | None = None
    """Dtype of the forward, the backward and the gathered weights: bf16 halves their bytes. The optimizer's weights
    keep their dtype."""
    reduce: Dtype | None = None
    """Dtype of gradients on the network; null: that of ``param``. Use fp32 where many ranks are summed."""
    output: Dtype | None = None
    """Dtype of the model's output. Not with fully_shard."""
    cast_forward_inputs: bool = True
    """Whether the model's inputs are cast to the dtype ``param``."""


@dataclass(frozen=True, config=_STRICT)
class CompressionFields:
    """How gradients and weights are encoded for the network."""

    gradients: str = "int8"
    """The codec of gradients; ``"fp32"`` for none; ``"powersgd"`` for two thin factors of each matrix.

    ``"auto"``: for each unit the least lossy of ``candidates`` that hides its reduce under the backward, chosen anew as
    training goes.
    """
    weights: str | None = None
    """The codec of weights; None: exact. Where weights stay unsharded on every rank, it encodes how steps have changed
    them (``compression.all_gather``): ``"int8"``, ``"fp8"``, ``"int4"``, ``"ternary"``, ``"onebit"``, or any other with
    scales. Where they are resharded after the forward, it rounds them: ``"int8"`` or ``"fp8"``."""
    feedback: bool | Literal["ef21"] = True
    """Whether what a message leaves out is kept in a residual and added to the next one (error feedback). Without error
    feedback, rounding is stochastic where the codec can do that.

    ``"ef21"``: messages hold the difference of gradients from the sum of all messages so far, which the owner keeps
    (``compression.error_feedback``): for Muon and other matrix optimizers. Takes ``residual="fp32"``.
    """
    residual: Literal["fp32", "bf16", "int8"] = "bf16"
    """Dtype of residuals: 4, 2, or just over 1 byte for each element and rank."""
    carry: Share = 1.0
    """Share of the residual that is added to the next message; below 1 as in LoCo (``error_feedback.Recursion``)."""
    scope: Scope = "auto"
    """Which sums are encoded: over the ranks of a shard, or over replicas; auto: over replicas, if there are any."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps before anything is encoded."""
    block: Block = 256
    """Number of elements that share a scale: 64, 128 or 256, or up to 4,096 if the model is sharded with that many."""
    matrix_rank: Positive = 8
    """Columns of the factor that ``"powersgd"`` sends in a step; PowerSGD of half the rank sends two, as many bytes."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Codecs of gradients by patterns of full parameter names (``"embed*": "fp32"``); the first to fit counts."""
    candidates: tuple[str, ...] = ("int8", "int4")
    """Codecs that ``"auto"`` may choose besides exact sums. int8 and int4 are known to do well with any optimizer."""
    error_budget: Share | None = None
    """Upper bound on the relative squared error of messages that ``"auto"`` may choose, on average over elements: int8
    for all has 0.00005, int4 for all 0.016. None: unbounded."""
    fallback: bool = True
    """Whether units fall back to more bits by themselves, int4 and then bf16, where messages keep too little of the
    gradients, or the losses given to ``yafsdp_cc.watch_loss`` rise. Units with ``"auto"`` do not."""


@dataclass(frozen=True, config=_STRICT)
class CompressionSection(CompressionFields):
    """How gradients and weights are encoded for the network: a codec of gradients by name, or these settings. Codecs of
    your own are named in the script."""

    gradients: Codec = "fp32"
    weights: WeightCodec | None = None
    overrides: Mapping[str, Codec] = field(default_factory=dict)
    candidates: Annotated[tuple[_Bits, ...], Field(min_length=1)] = ("int8", "int4")


class RunFile(BaseModel):
    """The settings of a run."""

    model_config = _STRICT

    launch: LaunchSection = LaunchSection()
    shard: ShardSection = ShardSection()
    precision: PrecisionSection = PrecisionSection()
    compression: CompressionSection | None = None


class RunFileError(ValueError):
    """An error that names every mistake in a run's settings, one to a line."""


class Setting(NamedTuple):
    """A setting's value, and where it is from: ``run.yaml:3``, ``--set``, ``--nnodes``, ``PET_NNODES``."""

    value: Any
    source: str


Settings: TypeAlias = dict[str, Setting]
"""Settings by dotted names such as ``shard.zero_stage``, without defaults."""


# What settings there are --------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """Return the JSON schema of run files, for editors."""
    whole = RunFile.model_json_schema()
    # ``CompressionSection`` has no docstrings of the fields that it narrows: take those of its base class
    documented = TypeAdapter(CompressionFields).json_schema()["properties"]
    for name, each in whole["$defs"]["CompressionSection"]["properties"].items():
        each["description"] = documented[name].get("description", "")
    by_name = whole["$defs"]["CompressionSection"]["properties"]["gradients"]["enum"]
    whole["properties"]["compression"]["anyOf"].insert(0, {"type": "string", "enum": by_name})
    return whole


@lru_cache(maxsize=1)
def known() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every setting by its dotted name."""
    kinds = schema()["$defs"]
    sections = {name: kinds[f"{name.title()}Section"]["properties"] for name in RunFile.model_fields}
    return {f"{section}.{name}": one for section, fields in sections.items() for name, one in fields.items()}


def allowed(one: Mapping[str, Any]) -> str:
    """Describe in words the values that the JSON schema ``one`` allows."""
    if "anyOf" in one:
        return ", or ".join(dict.fromkeys(map(allowed, one["anyOf"])))
    if "const" in one:
        return str(one["const"])
    if "enum" in one:
        *others, last = map(str, one["enum"])
        return f"{', '.join(others)} or {last}" if others else last
    if one["type"] == "integer":
        least, most = one.get("minimum"), one.get("maximum")
        if least is None:
            return "a whole number"
        return f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    if "exclusiveMinimum" in one:
        return f"a number of more than {one['exclusiveMinimum']}, up to {one['maximum']}"
    if "examples" in one:
        return f"text such as {one['examples'][0]}"
    if "pattern" in one:
        return "a name of letters, digits, '.', '-' and '_'"
    if one["type"] == "array":
        return f"a list, each {allowed(one['items'])}"
    if one["type"] == "object":
        return f"a mapping from text to {allowed(one['additionalProperties'])}"
    return {"boolean": "true or false", "number": "a number", "string": "text", "null": "null"}[one["type"]]


# Reading --------------------------------------------------------------------------------------------------------------


def read(file: str | os.PathLike[str] | None, assignments: Iterable[str] = ()) -> Settings:
    """Merge the settings of a run file, of the environment and of a command line.

    Args:
        file: a path; None: the one that ``YAFSDP_CC_CONFIG`` names, if any.
        assignments: the argument of each ``--set``, such as ``shard.zero_stage=2``.

    Raises:
        RunFileError: a setting is wrong; the message has a line for every mistake in any source.
    """
    reader = _Reader()
    if file is None:
        file = os.environ.get(CONFIG) or None  # an empty variable counts as unset
    if file is not None:
        reader.read_file(os.fspath(file))
    try:
        reader.read_assignments(SET, shlex.split(os.environ.get(SET, "")))
    except ValueError as error:
        reader.mistakes.append(f"{SET}: {error}")
    reader.read_assignments("--set", assignments)
    reader.mistakes = reader.mistakes or _contradictions(reader.settings)
    if reader.mistakes:
        raise RunFileError("\n".join(reader.mistakes))
    return reader.settings


_MOST_VALUES, _MOST_BYTES = 10_000, 1 << 17
"""Largest number of values, and of bytes, in a run file."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no stubs
    """Reads YAML with JSON's types only, written as in YAML 1.2: 1:4 is text, and duplicate keys are refused."""

    yaml_constructors: ClassVar = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }
    yaml_implicit_resolvers: ClassVar = {
        first: [one for one in known_by if one[0].endswith((":null", ":bool"))]
        for first, known_by in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> yaml.Node | None:
        """Return the root of the YAML document; raise if it has too many values, those that anchors repeat included."""
        root = super().get_single_node()
        sizes: dict[yaml.Node, int] = {}

        def size_of(node: yaml.Node) -> int:
            if node not in sizes:
                sizes[node] = 1  # ends the recursion of a node that contains itself, which pydantic refuses
                parts = () if isinstance(node, yaml.ScalarNode) else node.value
                inner = (each for part in parts for each in (part if isinstance(part, tuple) else (part,)))
                sizes[node] += sum(map(size_of, inner))
            return sizes[node]

        if root is not None and size_of(root) > _MOST_VALUES:
            raise yaml.YAMLError(
                f"more than {_MOST_VALUES:,} values, written out where anchors (&name, *name) repeat them: a run file "
                "has few, and needs no anchors"
            )
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(made) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is there twice", node.start_mark)
        return made


for _kind, _form, _first in (
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"({_form})$"), list(_first))


class _Reader:
    """Merges settings from sources of rising precedence, and collects their mistakes."""

    def __init__(self) -> None:
        self.settings: Settings = {}
        self.mistakes: list[str] = []

    def read_file(self, path: str) -> None:
        try:
            with open(path, "rb") as file:  # ``Path("")`` would be the working folder
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                self._refuse(path, f"is longer than the {_MOST_BYTES:,} bytes of a run file")
                return
            loader = _Loader(data.decode())
            root = loader.get_single_node()
            if root is None:
                return
            if not isinstance(root, yaml.MappingNode):
                self._refuse(f"{path}:1", f"holds no settings; it has sections: {', '.join(RunFile.model_fields)}")
                return
            for section, source, node in self._entries(loader, root, path):
                if isinstance(node, yaml.MappingNode) and section in RunFile.model_fields:
                    for name, where, value in self._entries(loader, node, path):
                        self.add(f"{section}.{name}", loader.construct_object(value, deep=True), where)
                else:
                    self.add(section, loader.construct_object(node, deep=True), source)
        except OSError as error:
            self._refuse(path or "''", f"{error.strerror}; yafsdp-cc config writes a run file")
        except UnicodeDecodeError:
            self._refuse(path, "is not UTF-8 text")
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            self._refuse(f"{path}:{line}", f"cannot be read as YAML: {error.problem}")
        except yaml.YAMLError as error:
            self._refuse(path, f"cannot be read as YAML: {str(error).splitlines()[0]}")
        except (ValueError, RecursionError) as error:  # by a number of too many digits, or lists nested too deeply
            self._refuse(path, f"cannot be read: {error}")

    def read_assignments(self, source: str, texts: Iterable[str]) -> None:
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                self._refuse(source, f"{text!r} sets nothing: write NAME=VALUE, such as shard.zero_stage=2")
                continue
            try:
                self.add(name.strip(), yaml.load(value, _Loader), source)
            except (yaml.YAMLError, ValueError, RecursionError):
                self._refuse(source, f"{name}: {value!r} cannot be read as YAML")

    def add(self, name: str, value: Any, source: str) -> None:
        section, _, leaf = name.partition(".")
        if name == "compression" and isinstance(value, str):
            name = "compression.gradients"
        elif not leaf and section in RunFile.model_fields:
            if value is None:  # null drops what sources of lower precedence have set
                self.settings = {known: one for known, one in self.settings.items() if known.split(".")[0] != section}
            elif isinstance(value, dict):
                for each, inner in value.items():
                    self.add(f"{section}.{each}", inner, source)
            else:
                self._refuse(
                    source, f"{section}: {json.dumps(value, default=str)} is no setting; it has {_of(section)}"
                )
            return
        wrong = mistake_in(name, value)
        if wrong:
            self._refuse(source, wrong)
        else:
            self.settings[name] = Setting(value, source)

    def _entries(
        self, loader: yaml.SafeLoader, node: yaml.MappingNode, path: str
    ) -> Iterator[tuple[str, str, yaml.Node]]:
        """Yield key, file and line, and value of each entry; refuse a key's second entry, which YAML would take."""
        lines: dict[str, int] = {}
        for key_node, value in node.value:
            key, line = str(loader.construct_object(key_node, deep=True)), key_node.start_mark.line + 1
            if key in lines:
                self._refuse(f"{path}:{line}", f"{key} is there already, in line {lines[key]}")
            else:
                lines[key] = line
                yield key, f"{path}:{line}", value

    def _refuse(self, source: str, why: str) -> None:
        self.mistakes.append(f"{source}: {why}")


def mistake_in(name: str, value: Any) -> str:
    """Describe what is wrong with the value of a setting; "" if nothing is."""
    section, _, leaf = name.partition(".")
    if name not in known():
        return f"there is no setting {name}; {_nearest_to(name)}"
    try:
        RunFile.model_validate_json(json.dumps({section: {leaf: value}}, default=str))
    except ValidationError:
        options, texts = set(_texts(known()[name], "enum")), [text for text in _texts(value) if text]
        wrong = next((text for text in texts if text not in options), "")
        near = difflib.get_close_matches(wrong, options, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"{name}: {json.dumps(value, default=str)} cannot be; it takes {allowed(known()[name])}{hint}"
    return ""


def _contradictions(settings: Settings) -> list[str]:
    """Describe settings that contradict each other, each valid by itself."""
    nested: dict[str, dict[str, Any]] = {}
    for name, one in settings.items():
        section, _, leaf = name.partition(".")
        nested.setdefault(section, {})[leaf] = one.value
    if "compression" in nested and "gradients" not in nested["compression"]:
        places = dict.fromkeys(one.source for name, one in settings.items() if name.startswith("compression."))
        return [f"{', '.join(places)}: compression.gradients names no codec: add one, such as int8, or fp32 for none"]
    try:
        RunFile.model_validate_json(json.dumps(nested))
    except ValidationError as error:
        found = []
        for each in error.errors():
            section = str(each["loc"][0])
            sources = [one.source for name, one in settings.items() if name.startswith(f"{section}.")]
            found.append(f"{', '.join(dict.fromkeys(sources))}: {section}: {each['ctx']['error']}")
        return found
    return []


def _nearest_to(name: str) -> str:
    section, _, leaf = name.rpartition(".")
    leaves = {each: each.partition(".")[2] for each in known()}
    elsewhere = [each for each, last in leaves.items() if last == leaf]
    nearby = difflib.get_close_matches(name, [*known(), *RunFile.model_fields], n=1)
    close = difflib.get_close_matches(leaf, leaves.values(), n=1)
    found = elsewhere or nearby or [each for each, last in leaves.items() if last in close]
    if found:
        return f"did you mean {found[0]}?"
    return (
        f"{section} has {_of(section)}"
        if section in RunFile.model_fields
        else f"sections: {', '.join(RunFile.model_fields)}"
    )


def _of(section: str) -> str:
    return ", ".join(name.partition(".")[2] for name in known() if name.startswith(f"{section}."))


def _texts(value: Any, key: str = "") -> Iterator[str]:
    """Yield the texts in nested lists and mappings; with a ``key``, only those under that key of a mapping."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, key if name != key else "")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str) and not key:
        yield value


# Writing --------------------------------------------------------------------------------------------------------------


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return a run file that sets some values by dotted name; all other settings are comments with their defaults."""
    lines = ["# Settings of a run: yafsdp-cc launch --config THIS script.py", "# What is commented out is the default."]
    for section in RunFile.model_fields:
        mine = {name: one for name, one in known().items() if name.startswith(f"{section}.")}
        lines += ["", f"{section}:" if mine.keys() & values.keys() else f"# {section}:"]
        for name, one in mine.items():
            sign = "" if name in values else "# "
            value = yaml.safe_dump(values.get(name, one.get("default", {})), default_flow_style=True, width=1 << 20)
            lines += [f"  # {line}" for line in summary(one).splitlines()]
            lines.append(f"  {sign}{name.partition('.')[2]}: {value.splitlines()[0]}")
    return "\n".join(lines) + "\n"


def summary(one: Mapping[str, Any]) -> str:
    """Return the first paragraph of a setting's description, without backquotes."""
    return str(one["description"]).split("\n\n")[0].replace("``", "")


def to_environment(settings: Settings) -> str:
    """Return the engine's ``settings`` as JSON, the value of ``YAFSDP_CC_RUN`` for the ranks."""
    return json.dumps({name: one for name, one in settings.items() if not name.startswith("launch.")}, default=str)


def run_settings() -> Settings:
    """Return the settings that a launcher has put into ``YAFSDP_CC_RUN``; none without a launcher.

    Raises:
        RunFileError: ``YAFSDP_CC_RUN`` holds something else.
    """
    return parsed(os.environ.get(RUN, "{}"))


@lru_cache(maxsize=1)
def parsed(text: str) -> Settings:
    """Return the settings in a JSON text from ``to_environment``."""
    try:
        settings = {name: Setting(*one) for name, one in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise RunFileError(f"{RUN} is not what `yafsdp-cc config show --json` prints: unset it") from None
    mistakes = [f"{one.source}: {wrong}" for name, one in settings.items() if (wrong := mistake_in(name, one.value))]
    if mistakes:
        raise RunFileError("\n".join(mistakes))
    return settings
