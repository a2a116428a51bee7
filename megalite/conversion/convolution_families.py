"""Families of Hugging Face models with short convolutions: LFM2."""

from __future__ import annotations

from typing import Any

from megalite.config import ModelConfig
from megalite.config.layer_specs import ATTENTION_LETTER, CONVOLUTION_LETTER
from megalite.conversion import config_keys as keys
from megalite.conversion.config_keys import Json, Keys, key, layers_of, value_of
from megalite.conversion.family import Family
from megalite.conversion.layer_keys import letters_of_kinds, mixers_of, only_with, pattern_fields, with_dense
from megalite.conversion.mapping import norm
from megalite.conversion.position_keys import rotary
from megalite.conversion.recurrent_rules import norms, short_convolution
from megalite.conversion.shared_rules import OF_ALL, WIDTHS, WITHOUT_BIASES, attention, ends, gated_mlp
from megalite.errors import CheckpointError
from megalite.small_files import shown

_KINDS = {"conv": CONVOLUTION_LETTER, "full_attention": ATTENTION_LETTER}


def lfm2_letters(config: Json) -> str:
    """Return the pattern of an LFM2 model. Its first files list the layers with attention, later ones all layers."""
    layers, kinds, listed = layers_of(config), config.get("layer_types"), config.get("full_attn_idxs")
    if kinds is not None:
        mixers = letters_of_kinds("layer_types", kinds, _KINDS)
    elif listed is None:
        mixers = ATTENTION_LETTER * layers
    elif isinstance(listed, list) and all(type(place) is int for place in listed):
        mixers = "".join(ATTENTION_LETTER if place in listed else CONVOLUTION_LETTER for place in range(layers))
    else:
        raise CheckpointError(f"full_attn_idxs is {shown(listed)}, it must be a list of numbers of layers")
    if len(mixers) != layers:
        raise CheckpointError(f"layer_types has {len(mixers)} entries for {layers} layers")
    return with_dense(mixers)


def _layers() -> Keys:
    letters = {letter: kind for kind, letter in _KINDS.items()}

    def write(model: ModelConfig) -> dict[str, Any]:
        mixers = mixers_of(model)
        return {"num_hidden_layers": len(mixers), "layer_types": [letters.get(each, "neither") for each in mixers]}

    names = ("num_hidden_layers", "layer_types", "full_attn_idxs")
    return Keys(names, lambda config: pattern_fields(lfm2_letters(config)), write)


def _width() -> Keys:
    """Return the entry for the width of the feed-forward layers, of which files may give 3/2, before it is rounded."""

    def read(config: Json) -> dict[str, Any]:
        width = config.get("block_ff_dim") or value_of(config, "intermediate_size")
        if value_of(config, "block_auto_adjust_ff_dim", True):
            multiple = value_of(config, "block_multiple_of", 256)
            width = int(int(2 * width / 3) * value_of(config, "block_ffn_dim_multiplier", 1.0))
            width = -(-width // multiple) * multiple
        return {"ffn_hidden_size": width}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"intermediate_size": model.ffn_size, "block_auto_adjust_ff_dim": False}

    names = ("intermediate_size", "block_ff_dim", "block_auto_adjust_ff_dim")
    return Keys((*names, "block_multiple_of", "block_ffn_dim_multiplier"), read, write)


def _tied() -> Keys:
    """Return the entry for the key that ties the output layer to the word embedding, whose older name goes first."""

    def read(config: Json) -> dict[str, Any]:
        tied = value_of(config, "tie_embedding", value_of(config, "tie_word_embeddings", True))
        return {"untie_embeddings_and_output_weights": not tied}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"tie_word_embeddings": not model.untie_embeddings_and_output_weights}

    return Keys(("tie_word_embeddings", "tie_embedding"), read, write)


_LAYER = "model.layers.{layer}"
LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    (
        *OF_ALL,
        *WIDTHS,
        _width(),
        _layers(),
        key("norm_eps", "norm_epsilon", 1e-5),
        _tied(),
        keys.grouped_queries(8),
        keys.head_width(),
        rotary(default_base=1e6),
        *only_with(
            CONVOLUTION_LETTER,
            lfm2_letters,
            key("conv_L_cache", "short_conv_kernel_dim", 3),
            key("conv_bias", "short_conv_bias", False),
        ),
    ),
    WITHOUT_BIASES | {"swiglu": True, "qk_layernorm": True, "attention_dropout": 0.0},
    (
        *norms(f"{_LAYER}.operator_norm", "short_convolution_norm", "input_norm"),
        *short_convolution(f"{_LAYER}.conv"),
        *attention(f"{_LAYER}.self_attn", output="out_proj", norms="layernorm"),
        *norm(f"{_LAYER}.ffn_norm", "mlp_norm"),
        *gated_mlp(f"{_LAYER}.feed_forward", ("w1", "w3", "w2")),
        *ends("model.embed_tokens.weight", "model.embedding_norm", "lm_head.weight"),
    ),
)
