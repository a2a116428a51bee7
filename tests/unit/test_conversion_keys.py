"""Keys of a folder's files: each, given, left out or null, is read as transformers' classes read it, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig

from megalite.config import ModelConfig
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import Family
from megalite.conversion.folder_keys import Fates
from megalite.conversion.huggingface import open_huggingface
from megalite.errors import CheckpointError
from tests.harness import huggingface as theirs
from tests.harness.huggingface import CONFIGS

BY_NAME = {family.name: family for family in FAMILIES}
LEGACY = {"rope_theta", "rope_scaling"}
"""Keys that classes take without a field of their own."""
Json = dict[str, Any]


def refused_or(family: Family, config: Mapping[str, Any]) -> Json | None:
    """Return the network that a config.json describes; None if it is refused."""
    try:
        model: ModelConfig = family.model(config)
    except CheckpointError:
        return None
    return asdict(model) | {"kv_channels": model.head_dim, "ffn_hidden_size": model.ffn_size}


def completed(kind: type, config: Mapping[str, Any]) -> Json | None:
    """Return a config.json with transformers' values for all that it does not say; None if transformers refuses it."""
    try:
        found: Json = json.loads(json.dumps(kind(**json.loads(json.dumps(config))).to_dict()))
    except Exception:
        return None
    return found


def without(config: Json, key: str) -> Json:
    return {name: value for name, value in config.items() if name != key}


# ------------------------------------------------------------------------------------------------ fates


def once(fates: Fates) -> set[str]:
    """Return the keys with a fate. Fails if one has two."""
    keys = [*fates.applied, *fates.no_effect, *fates.refused]
    assert len(keys) == len({*keys})
    return {*keys}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_key_that_transformers_reads_has_exactly_one_fate(name: str) -> None:
    kind = CONFIG_MAPPING[name]
    read = {field.name for field in fields(kind)} | {*kind.attribute_map} | LEGACY
    read |= GenerationConfig._get_default_generation_params().keys()
    if name == "gpt2":
        read -= LEGACY  # which has no rotary embeddings, and refuses them as unknown
    if name == "gpt_neox":
        read = read - {"rope_theta"} | {"rotary_emb_base", "rotary_pct"}
    assert read - once(BY_NAME[name].fates) == set()


def test_every_key_of_the_other_files_has_exactly_one_fate() -> None:
    assert vars(GenerationConfig()).keys() - once(Fates.of("generation_config")) == set()
    assert once(Fates.of("index")) == {"metadata", "weight_map"}


def test_keys_of_tomorrow_are_refused_in_every_file(tmp_path: Path) -> None:
    family = BY_NAME["llama"]
    folder = tmp_path / "llama"
    theirs.save(folder, "llama", max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, content in (("generation_config.json", {"of_tomorrow": 1}), ("model.safetensors.index.json", index)):
        before = (folder / name).read_text()
        (folder / name).write_text(json.dumps(content | {"of_tomorrow": 1}))
        with pytest.raises(CheckpointError, match=rf"{name} has keys .*\n  of_tomorrow is unknown: 1"):
            open_huggingface(folder)
        (folder / name).write_text(before)
    open_huggingface(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: an adapter is not applied"):
        open_huggingface(folder)
    config = json.loads((folder / "config.json").read_text())
    for key, why in family.fates.refused.items():
        with pytest.raises(CheckpointError, match=rf"  {key}: {why.split('(')[0]}"):
            family.model(config | {key: {"a": 1}})
        assert family.model(config | {key: None}) == family.model(config)


# ------------------------------------------------------------------------------------------------ defaults


SIZES = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 96, "max_position_embeddings": 64}
REQUIRED: dict[str, Json] = {name: {"vocab_size": 67, "intermediate_size": 40} | SIZES for name in BY_NAME}
REQUIRED["gpt2"] = {"vocab_size": 67, "n_layer": 4, "n_embd": 768, "n_head": 96, "n_positions": 64}
REQUIRED["mixtral"] |= {"num_local_experts": 16}
REQUIRED["qwen3_moe"] |= {"num_experts": 16, "moe_intermediate_size": 16}
REQUIRED["qwen2_moe"] |= {"num_experts": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
REQUIRED["gpt_oss"] |= {"num_local_experts": 16}
REQUIRED["minimax_m2"] |= {"num_local_experts": 16}
REQUIRED["olmoe"] |= {"num_experts": 16}
REQUIRED["glm4_moe"] |= {"n_routed_experts": 16}
REQUIRED["qwen3_next"] |= {"num_experts": 16}
REQUIRED["qwen3_5_moe_text"] |= {"num_experts": 16}
REQUIRED["deepseek_v2"] |= {"n_routed_experts": 16, "num_experts_per_tok": 2}
REQUIRED["deepseek_v3"] |= {"n_routed_experts": 16, "num_attention_heads": 128}
REQUIRED["deepseek_v32"] |= {"n_routed_experts": 16, "num_attention_heads": 128}
REQUIRED["glm_moe_dsa"] |= {"n_routed_experts": 16, "num_attention_heads": 64}
REQUIRED["kimi_linear"] |= {
    "num_experts": 16,
    "num_attention_heads": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
del REQUIRED["qwen3_5_moe_text"]["intermediate_size"]
REQUIRED["granitemoehybrid"] |= {"rms_norm_eps": 1e-5}
REQUIRED["nemotron_h"] |= {"n_routed_experts": 16, "hybrid_override_pattern": "ME*-"}
del REQUIRED["nemotron_h"]["num_hidden_layers"]  # which the pattern says
"""Keys that a config.json must have here, although transformers' classes have sizes of some model for them."""


@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_config_leaves_out_is_as_transformers_class_has_it(name: str) -> None:
    family, least = BY_NAME[name], REQUIRED[name]
    found = refused_or(family, least)
    assert found is not None
    assert found == refused_or(family, completed(CONFIG_MAPPING[name], least) or {})
    for key in least:
        assert refused_or(family, without(least, key)) is None


def forms(name: str) -> tuple[Family, type, list[Json]]:
    """Return the family of a model of `CONFIGS`, transformers' class, and its config.json in both generations."""
    config = theirs.make_config(name)
    family, written = BY_NAME[config.model_type], theirs.as_written(config)
    return family, type(config), [written, family.config(family.model(written))]


def changed(config: Json, keys: set[str]) -> Iterator[tuple[str, Json]]:
    """Yield a config.json without each key, with each key as null, and with another value of each key."""
    for key in sorted(keys):
        yield f"without {key}", {name: value for name, value in config.items() if name != key}
        yield f"{key} null", config | {key: None}
        value = config.get(key)
        if type(value) in (bool, int, float):
            yield f"another {key}", config | {key: (not value) if type(value) is bool else value * 2}
        for inner, below in value.items() if type(value) is dict else ():
            for what, other in changed(value, {inner}):
                yield f"{key}: {what}", config | {key: other}
            if type(below) is dict:
                for what, other in changed(below, {*below}):
                    yield f"{key}.{inner}: {what}", config | {key: value | {inner: other}}


NULL = {"num_key_value_heads"}
"""Keys whose null older versions give a meaning that the shapes of the files confirm: as many as heads."""


@pytest.mark.wide
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_left_out_or_null_or_another_is_as_transformers_has_it(name: str) -> None:
    family, kind, configs = forms(name)
    keys = {*family.fates.applied, *(field.name for field in fields(kind))}
    wrong, compared = [], 0
    for config in configs:
        for what, part in changed(config, keys):
            found, whole = refused_or(family, part), completed(kind, part)
            if found is None:
                continue
            if whole is None:  # then null must mean what leaving the key out means
                key = what.removesuffix(" null").rpartition(" ")[2]
                left_out = refused_or(family, without(part, key))
                wrong += [what] if key not in NULL and found != left_out and "another" not in what else []
            else:
                compared += 1
                wrong += [what] if found != refused_or(family, whole) else []
    assert wrong == []
    assert compared > 20


OTHERS: dict[str, tuple[str, Json, str]] = {
    "windows of an unsaid layer": (
        "qwen2-moe",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": None},
        "no layer_types says which layers have windows",
    ),
    "windows that are off": ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window is null or switched"),
    "windows without a size": ("gemma2", {"sliding_window": None}, "sliding_window is null or switched off"),
    "a pattern of another family": ("gemma2", {"sliding_window_pattern": 3, "layer_types": None}, "but only 2 is"),
    "two dropouts": ("gpt2", {"embd_pdrop": 0.2}, "embd_pdrop is 0.2 and resid_pdrop 0.1, but they must be equal"),
    "a part of the rotation": (
        "gemma3",
        {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
        "partial_rotary_factor of rotary embeddings of layers of two kinds",
    ),
    "scaling that lacks its numbers": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "have no low_freq_factor and no high_freq_factor",
    ),
    "null for a number": ("llama", {"rms_norm_eps": None}, "rms_norm_eps is null: give its value, or leave it out for"),
    "null for yes": ("gpt2", {"tie_word_embeddings": None}, "tie_word_embeddings is null: give its value, or leave it"),
    "a missing width": ("llama", {"intermediate_size": "gone"}, "it has no intermediate_size"),
    "layers without an indexer, said twice": (
        "glm-moe-dsa",
        {"index_topk_freq": 4, "index_skip_topk_offset": 1},
        "index_topk_freq and index_skip_topk_offset differ: give one",
    ),
    "numbers of prediction layers": ("glm4-moe", {"num_mtp_layers": 1}, "num_mtp_layers differ"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_versions_of_transformers_differ_on_is_refused(what: str) -> None:
    name, changes, words = OTHERS[what]
    family, _, (config, _) = forms(name)
    with pytest.raises(CheckpointError, match=words):
        family.model({key: value for key, value in (config | changes).items() if value != "gone"})


FORM = {"return_dict", "output_hidden_states"}
"""Keys that change the form of what a model returns."""
ROUNDING = {"chunk_size", "mamba_chunk_size"}
"""Keys that change the order of sums."""


@pytest.mark.wide
@pytest.mark.parametrize("name", BY_NAME)
def test_keys_that_have_no_effect_here_have_none_in_transformers(name: str) -> None:
    model = next(each for each in CONFIGS if theirs.make_config(each).model_type == name)
    plain, no_effect = theirs.make_config(model), BY_NAME[name].fates.no_effect.keys() - FORM
    values = {key: value for key, value in vars(plain).items() if key in no_effect}
    others = {key: not value for key, value in values.items() if type(value) is bool}
    others |= {key: value * 2 + 1 for key, value in values.items() if type(value) in (int, float)}
    assert "use_cache" in others
    other = theirs.make_model(theirs.make_config(model, others))
    found, expected = (theirs.logits(each, theirs.tokens()) for each in (other, theirs.make_model(plain)))
    assert (found - expected).abs().max() <= (1e-5 if ROUNDING & others.keys() else 0.0)
