"""Family of models: a table with which the Hugging Face folders of the family are read and written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, get_args, get_type_hints

from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig
from megalite.config.fields import flag_of
from megalite.config.validate_model import model_problems, number_problems
from megalite.conversion.block_fp8 import unpacked
from megalite.conversion.config_keys import UNREADABLE, Json, Keys, prediction_layers
from megalite.conversion.folder_keys import Fates, KeyFate
from megalite.conversion.mapping import Rule, Stored
from megalite.errors import CheckpointError, ConfigurationError
from megalite.small_files import shown

CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that do not describe the network but are kept: the numbers of a tokenizer's special tokens."""

_KEPT = "a special token's number, which exports keep"
_CHECKED = "checked: megalite has what it says, and nothing else"
_NO_SUCH_LAYER = "it describes a kind of layer that the model does not have"
_KINDS = get_type_hints(ModelConfig)


@dataclass(frozen=True)
class Family:
    """Table of the Hugging Face folders of one kind of model."""

    name: str
    """model_type in config.json."""
    architecture: str
    """Only architecture in config.json."""
    keys: tuple[Keys, ...]
    always: Mapping[str, Any]
    """Fields of ModelConfig that are the same for every model of the family."""
    rules: tuple[Rule, ...]
    rewritten: tuple[Rule, ...] = ()
    """Rules for files in another form, as transformers 5 may write them: with all experts of a layer in one tensor, or
    with norms of other names; () if none."""
    prefixes: Mapping[str, str] = field(default_factory=lambda: {"": "model."})
    """Prefixes of tensor names in some files, each with that in the table; such as none."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Patterns of tensor names that some files have, with the names in the table, as `re.sub` takes both."""
    head: str = "lm_head.weight"
    """Name of the output layer. Files of a tied model may also have it, if it equals the embedding."""
    buffers: str = r".*rotary_emb\.inv_freq"
    """Pattern for the names of tensors that are not weights."""
    further: str | None = None
    """Pattern for the names of tensors of layers that predict further tokens, {layers} for the numbers after the last
    layer; None if models have none.

    They are left out on reading, with a note, unless `keys` make them depths (`prediction_depths`).
    """
    halves: int = 2
    """Halves of a layer of the files: a mixer and a feed-forward layer (2), or one of them (1)."""
    other_names: tuple[str, ...] = ()
    """Further values of model_type for the same models. They are never written."""
    unpack: Callable[[Stored, Json], Stored] = unpacked
    """Function that puts weights in the place of the blocks of quantized files (`mxfp4.py`, `block_fp8.py`), given
    config.json."""

    @property
    def fates(self) -> Fates:
        """Fates of the keys of config.json."""
        return Fates.of("config", self.name, {name for keys in self.keys for name in keys.names}.union(CARRIED))

    def model(self, config: Json) -> ModelConfig:
        """Return the network that a config.json describes.

        Raises CheckpointError with a list of all keys and values that describe a network which megalite does not have.
        """
        values = dict(self.always)
        problems = self.fates.problems(config)
        for _, fields, problem in self._read(config):
            values |= fields
            problems += [problem] if problem else []
        problems = problems or list(_nonsense(values))
        model = None if problems else ModelConfig(**values)
        if model is not None:
            problems = number_problems(model) or list(_indivisible(model)) or model_problems(model)
        if model is None or problems:
            raise CheckpointError("\n".join(f"  {problem}" for problem in problems))
        return model

    def _read(self, config: Json) -> Iterator[tuple[Keys, dict[str, Any], str]]:
        """Yield each entry with the fields that it reads, or none and the problem."""
        for keys in self.keys:
            try:
                if keys.applies(config):
                    yield keys, keys.read(config), ""
            except CheckpointError as error:
                yield keys, {}, str(error)
            except UNREADABLE:
                there = [f"{name} {shown(config[name])}" for name in keys.names if name in config]
                yield keys, {}, f"{', '.join(there or keys.names)} cannot be read"

    def key_fates(self, config: Json) -> Iterator[KeyFate]:
        """Yield the fate of each key of a config.json; of a key that is used, the flags that it stands for."""
        read = {name: KeyFate(name, "noted", _NO_SUCH_LAYER) for keys in self.keys for name in keys.names}
        read |= {name: KeyFate(name, "used", _KEPT) for name in CARRIED}
        for keys, fields, problem in self._read(config):
            why = problem or _as_flags(fields) or _CHECKED
            read |= {name: KeyFate(name, "refused" if problem else "used", why) for name in keys.names}
        for fate in self.fates.of_keys(config):
            yield read[fate.key] if fate.kind == "used" else fate

    def of_prediction_layers(self, config: Json) -> str | None:
        """Return a pattern for the names of the tensors of prediction layers; None if the family has none.

        Of a model whose `config` has none, it is that of the next ten layers: files may have more than config.json.
        `config` is one that `model` accepts.
        """
        if self.further is None or "{layers}" not in self.further:
            return self.further
        numbers = range(prediction_layers(config) or 10)
        return self.further.replace("{layers}", "|".join(str(config["num_hidden_layers"] + layer) for layer in numbers))

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json of a network.

        Raises CheckpointError, listing each difference, if the family cannot describe the network.
        """
        written: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for keys in self.keys:
            written |= keys.write(model)
        ours, theirs = function_of(model), function_of(self.model(written))
        different = [name for name in ours if ours[name] != theirs[name]]
        if different:
            flags = [f"--{name.replace('_', '-')} {ours[name]} ({self.name} has {theirs[name]})" for name in different]
            raise CheckpointError(", ".join(flags))
        return written


def _as_flags(fields: Mapping[str, Any]) -> str:
    """Return the flags for fields; of several fields, those without the flag's default."""
    others = {name: value for name, value in fields.items() if value != getattr(ModelConfig, name, None)}
    given = {name: value for name, value in (others or fields).items() if value is not None}
    off = [name for name, value in given.items() if value is False]
    if len(off) > 1:  # such as the flags of other activations
        given = {name: value for name, value in given.items() if value is not False}
    flags = {name: flag_of(name) + ("" if value is True else f" {shown(value)}") for name, value in given.items()}
    return ", ".join(f"--no-{flag_of(name)[2:]}" if name in off else flag for name, flag in flags.items())


def _nonsense(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors in single fields of ModelConfig. A config.json may have any value for a field."""
    for name, value in values.items():
        kind = _KINDS[name]
        optional = NoneType in get_args(kind)
        if value is None and optional:
            continue
        wanted = get_args(kind)[0] if optional else kind
        if wanted is int and (type(value) is not int or value < 1):
            yield f"{name} is {shown(value)}, it must be a whole number above 0"
        if wanted is float and type(value) is not int and (type(value) is not float or not math.isfinite(value)):
            yield f"{name} is {shown(value)}, it must be a number"
        if wanted is bool and type(value) is not bool:
            yield f"{name} is {shown(value)}, it must be true or false"


def _indivisible(model: ModelConfig) -> Iterator[str]:
    """Yield the errors in combinations of sizes."""
    heads, groups = model.num_attention_heads, model.kv_groups
    if heads % groups:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
    rotated = model.rotated_channels
    if model.rotary and (rotated < 2 or rotated % 2):
        yield f"{rotated} channels of each head are rotated, but the number must be even"
    try:
        _ = model.layers
    except ConfigurationError as error:
        yield str(error)


def choose(families: Sequence[Family], model: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """Return the first family that has exactly this network, and the network's config.json.

    If there is none, raise CheckpointError with the differences from the nearest family.
    """
    reasons = {}
    for family in families:
        try:
            return family, family.config(model)
        except CheckpointError as error:
            reasons[family.name] = str(error)
    # A family whose error does not begin with a flag cannot even express the network. It is the last choice.
    nearest = min(reasons, key=lambda name: reasons[name].count("--") if reasons[name].startswith("--") else math.inf)
    raise CheckpointError(
        f"no family of Hugging Face has this network; the nearest is {nearest}, except {reasons[nearest]}"
    )
