"""A family of models: one table, by which its folders are read and written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig
from megalite.conversion.config_keys import Json, Keys
from megalite.conversion.mapping import Rule
from megalite.errors import CheckpointError

CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that are not of the model but go with it: what a tokenizer's special tokens are."""

_OF_NO_ACCOUNT = {
    # the file itself
    "architectures", "auto_map", "_name_or_path", "transformers_version", "model_type", "torch_dtype", "dtype",
    "name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    # how it is run, and for what
    "use_cache", "gradient_checkpointing", "output_attentions", "output_hidden_states", "output_past", "return_dict",
    "is_decoder", "is_encoder_decoder", "pretraining_tp", "task_specific_params", "cache_implementation",
    "problem_type", "id2label", "label2id", "num_labels", "finetuning_task", "prefix", "torchscript",
    "unk_token_id", "sep_token_id", "decoder_start_token_id", "n_ctx", "classifier_dropout",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What folders of one kind are like."""

    name: str
    """config.json's model_type."""
    architecture: str
    """config.json's only architecture."""
    keys: tuple[Keys, ...]
    always: Mapping[str, Any]
    """Fields of ModelConfig that are the same in all of the family."""
    rules: tuple[Rule, ...]
    prefix: str = ""
    """What the names of tensors begin with, and in some files do not."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensors that some files have by another name, by that name."""
    head: str = "lm_head.weight"
    """The output layer, which files of a tied model may have, too: it must be the embedding then."""
    buffers: str = r".*rotary_emb\.inv_freq"
    """A pattern of names of tensors that are no weights."""

    def model(self, config: Json) -> ModelConfig:
        """The network that a config.json describes.

        Raises CheckpointError for every key, or value, that says something of a network which megalite has not.
        """
        values = dict(self.always)
        known = _OF_NO_ACCOUNT | set(CARRIED)
        problems = []
        for keys in self.keys:
            known |= set(keys.names)
            try:
                values |= keys.read(config)
            except CheckpointError as error:
                problems.append(str(error))
        problems += [f"{name} is unknown: {config[name]!r}" for name in config if name not in known]
        if problems:
            raise CheckpointError("\n".join(f"  {problem}" for problem in problems))
        return ModelConfig(**values)

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """The config.json of a network. Raises CheckpointError, with each difference, where it cannot say that."""
        written: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for keys in self.keys:
            written |= keys.write(model)
        ours, theirs = function_of(model), function_of(self.model(written))
        different = [name for name in ours if ours[name] != theirs[name]]
        if different:
            flags = [f"--{name.replace('_', '-')} {ours[name]} ({self.name} has {theirs[name]})" for name in different]
            raise CheckpointError(", ".join(flags))
        return written

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor of this name is no weight."""
        return re.fullmatch(self.buffers, name) is not None


def choose(families: Sequence[Family], model: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The first family that has this very network, and its config.json.

    Raises CheckpointError, naming what stands in the way of the nearest, where none has.
    """
    reasons = {}
    for family in families:
        try:
            return family, family.config(model)
        except CheckpointError as error:
            reasons[family.name] = str(error)
    nearest = min(reasons, key=lambda name: reasons[name].count("--"))
    raise CheckpointError(
        f"no family of Hugging Face has this network; the nearest is {nearest}, but for {reasons[nearest]}"
    )
