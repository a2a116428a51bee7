"""Meaning of Megatron-LM's flags for latent attention: --position-embedding-type does not say its rotation there."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Literal

from megalite.config.megatron_flags import ROPE_TYPE, Note
from megalite.config.model import ModelConfig
from megalite.errors import ConfigurationError

RopeType = Literal["rope", "yarn"]
ORIGINAL_POSITIONS = 4096
"""Context length before YaRN in Megatron-LM's latent attention, which no flag of it changes."""


def with_megatrons_rotation(model: ModelConfig, rope_type: str | None) -> ModelConfig:
    """Return a network whose latent attention is rotated as Megatron-LM rotates it, with this --rope-type.

    There it is rotated by YaRN, unless --rope-type is rope. With a --rotary-scaling-factor of 1, the default, YaRN is a
    plain rotation. --position-embedding-type says whether there is a learned table, too. Networks with YaRN or without
    a rotation by --position-embedding-type are only here, and stay as they are.

    Raises:
        ConfigurationError: the type of the rotation contradicts another flag.
    """
    kind, factor = model.position_embedding_type, model.rotary_scaling_factor
    if not model.has_latents:
        if rope_type == "yarn":
            raise ConfigurationError("--rope-type yarn needs latent attention: give --position-embedding-type yarn")
        return model
    if rope_type is not None and (kind == "none" or (kind == "yarn" and rope_type == "rope")):
        raise ConfigurationError(
            f"--rope-type {rope_type} contradicts --position-embedding-type {kind}: leave --rope-type out"
        )
    if factor == 1 or kind not in ("rope", "learned_absolute"):
        return model
    if rope_type == "rope" and model.mscale_all_dim:
        raise ConfigurationError(
            f"--rope-type rope with --rotary-scaling-factor {factor:g} and --mscale-all-dim {model.mscale_all_dim:g}: "
            "Megatron-LM multiplies the scores as under YaRN without its rotation, megalite does not: leave one out"
        )
    if rope_type == "rope":
        return replace(model, rotary_scaling_factor=1.0)
    if kind == "learned_absolute":
        raise ConfigurationError(
            f"--rotary-scaling-factor {factor:g} with --position-embedding-type learned_absolute: YaRN beside a table "
            "of positions is not supported: give --position-embedding-type rope"
        )
    original = model.yarn_original_max_position_embeddings or ORIGINAL_POSITIONS
    return replace(model, position_embedding_type="yarn", yarn_original_max_position_embeddings=original)


def latent_notes(
    model: ModelConfig, rotated: ModelConfig, rope_type: str | None, given: Container[str]
) -> Iterator[Note]:
    """Yield what the flags that are `given` mean for latent attention, as against Megatron-LM.

    `rotated`: what `with_megatrons_rotation` has made of the network.
    """
    factor, kind = f"--rotary-scaling-factor {model.rotary_scaling_factor:g}", rotated.position_embedding_type
    if kind != model.position_embedding_type:
        original = f"--yarn-original-max-position-embeddings {rotated.yarn_original_max_position_embeddings}"
        yield Note(factor, f"is --position-embedding-type {kind} {original} here, for latent attention")
    elif rotated != model:
        yield Note(factor, f"changes nothing, since --{ROPE_TYPE} is rope")
    elif rope_type is not None:
        yield Note(f"--{ROPE_TYPE} {rope_type}", "already so")
    elif kind == "none" and model.has_latents and "position-embedding-type" in given:
        why = "latent attention is not rotated, but always is in Megatron-LM (--position-embedding-type rope)"
        yield Note("--position-embedding-type none", why)
    scalings = [name for name in ("use-rope-scaling", "rotary-seq-len-interpolation-factor") if name in given]
    if model.has_latents and scalings:
        why = "scales the rotation of latent attention, which Megatron-LM leaves as it is"
        yield from (Note(f"--{name}", why) for name in scalings)
    if model.has_latents and model.q_lora_rank is None and model.qk_layernorm and "qk-layernorm" in given:
        alone = "without --q-lora-rank the latent of keys and values alone is normalised"
        yield Note("--qk-layernorm", f"{alone}; Megatron-LM since 0.19 normalises the input of the queries, too")
