"""Megatron-LM's older checkpoints, as runs of any layout wrote them, made from a network's logical tensors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from megalite.config import ModelConfig

Names = Literal["core", "local", "old", "oldest"]
OLD = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}


def whole(model: ModelConfig, weights: Mapping[str, Tensor], padding: int) -> dict[str, Tensor]:
    """Return Megatron-LM's unsharded tensors by megatron-core's names; the vocabulary is padded with `padding` rows of
    noise."""
    found: dict[str, Tensor] = {}
    pairs = [("embedding.word_embeddings.weight", "embedding.word"), ("output_layer.weight", "output")]
    for theirs, ours in pairs:
        if ours in weights:
            found[theirs] = torch.cat((weights[ours], weights[ours].new_full((padding, model.hidden_size), 99.0)))
    if "embedding.position" in weights:
        found["embedding.position_embeddings.weight"] = weights["embedding.position"]
    for part in ("weight", "bias"):
        if f"final_norm.{part}" in weights:
            found[f"decoder.final_layernorm.{part}"] = weights[f"final_norm.{part}"]
    for layer in range(model.num_layers):
        for name, values in _layer(model, weights, f"layers.{layer}.").items():
            found[f"decoder.layers.{layer}.{name}"] = values
    return found


def _layer(model: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    def get(name: str) -> Tensor | None:
        return weights.get(prefix + name)

    found: dict[str, Tensor | None] = {}
    for part in ("weight", "bias"):
        found[f"self_attention.linear_qkv.layer_norm_{part}"] = get(f"input_norm.{part}")
        found[f"mlp.linear_fc1.layer_norm_{part}"] = get(f"mlp_norm.{part}")
        found[f"self_attention.q_layernorm.{part}"] = get(f"attention.query_norm.{part}")
        found[f"self_attention.k_layernorm.{part}"] = get(f"attention.key_norm.{part}")
        suffix = "" if part == "weight" else "_bias"
        query, key_value = get(f"attention.query{suffix}"), get(f"attention.key_value{suffix}")
        if query is not None and key_value is not None:
            each = model.num_attention_heads // model.kv_groups
            rows: list[Tensor] = []
            for group in range(model.kv_groups):
                rows += [query[group * each + head] for head in range(each)]
                rows += [key_value[group, 0], key_value[group, 1]]
            found[f"self_attention.linear_qkv.{part}"] = torch.cat(rows)
        gate_up = get(f"mlp.gate_up{suffix}")
        up = get(f"mlp.up{suffix}") if gate_up is None else torch.cat((gate_up[0], gate_up[1]))
        found[f"mlp.linear_fc1.{part}"] = up
    output, width = weights[prefix + "attention.output"], model.head_dim
    found["self_attention.linear_proj.weight"] = output.reshape(-1, model.num_attention_heads * width)
    found["self_attention.linear_proj.bias"] = get("attention.output_bias")
    found["mlp.linear_fc2.weight"] = get("mlp.down")
    found["mlp.linear_fc2.bias"] = get("mlp.down_bias")
    return {name: values for name, values in found.items() if values is not None}


def shard(model: ModelConfig, name: str, values: Tensor, ranks: int, rank: int) -> Tensor:
    """Return the part of a tensor-parallel rank, in its own memory."""
    if "layer_norm" in name or "layernorm" in name or "position" in name:
        return values
    if "linear_fc1" in name and model.activation.gated:
        gate, up = values.chunk(2)
        return torch.cat((gate.chunk(ranks)[rank], up.chunk(ranks)[rank]))
    if "linear_proj" in name or "linear_fc2" in name:
        return values.chunk(ranks, dim=1)[rank].clone() if name.endswith("weight") else values
    return values.chunk(ranks)[rank].clone()


def write(
    folder: Path,
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    args: Mapping[str, Any],
    *,
    tensor_ranks: int = 1,
    stages: Sequence[Sequence[int]] = (),
    names: Names = "core",
    padding: int = 3,
    version: float = 3.0,
) -> None:
    """Write a checkpoint. `stages`: for each model chunk of a rank, in order, the number of layers on each pipeline
    rank."""
    stages = stages or [[model.num_layers]]
    tensors = whole(model, weights, padding)
    pipeline_ranks, invented = len(stages[0]), ModuleType("invented_arguments")
    namespace = type("Namespace", (argparse.Namespace,), {"__module__": invented.__name__})
    invented.Namespace = namespace  # type: ignore[attr-defined]
    sys.modules[invented.__name__] = invented
    try:
        for rank in range(tensor_ranks):
            for pipeline in range(pipeline_ranks):
                state = {"args": namespace(**args), "checkpoint_version": version, "iteration": 7}
                for number, counts in enumerate(stages):
                    first = sum(map(sum, stages[:number])) + sum(counts[:pipeline])
                    part = {name: shard(model, name, each, tensor_ranks, rank) for name, each in tensors.items()}
                    begins = number == 0 and pipeline == 0
                    ends = number == len(stages) - 1 and pipeline == pipeline_ranks - 1
                    key = "model" if len(stages) == 1 else f"model{number}"
                    state[key] = _stage(part, range(first, first + counts[pipeline]), begins, ends, names)
                of_stage = f"_{pipeline:03d}" if pipeline_ranks > 1 else ""
                path = folder / f"mp_rank_{rank:02d}{of_stage}" / "model_optim_rng.pt"
                path.parent.mkdir(parents=True)
                torch.save(state, path)
    finally:
        del sys.modules[invented.__name__]


def _stage(part: Mapping[str, Tensor], layers: range, begins: bool, ends: bool, names: Names) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, values in part.items():
        if name.startswith("decoder.layers."):
            layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if int(layer) in layers:
                flat[f"decoder.layers.{int(layer) - layers.start}.{rest}"] = values
        elif begins if name.startswith("embedding") else ends:
            flat[name] = values
    if ends and not begins and "output_layer.weight" not in part:  # tied
        flat["output_layer.weight"] = part["embedding.word_embeddings.weight"].clone()
    if names == "core":
        return flat | {f"decoder.layers.{n}.self_attention.linear_qkv._extra_state": None for n in range(len(layers))}
    if names == "local":
        for new, old in (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "pre_mlp_layernorm")):
            flat = {name.replace(f"{new}.layer_norm_", f"{old}."): values for name, values in flat.items()}
        return flat
    copy = (
        flat.pop("output_layer.weight") if "output_layer.weight" in flat and "output_layer.weight" not in part else None
    )
    model: dict[str, Any] = {"language_model": _old(flat, names)}
    return model if copy is None else model | {"word_embeddings_for_head": {"weight": copy}}


def _old(flat: Mapping[str, Tensor], names: Names) -> dict[str, Any]:
    """Return nested state, by the names of language_model.py."""
    body, model = ("encoder" if names == "old" else "transformer"), dict[str, Any]()
    for name, values in flat.items():
        first, rest = name.split(".", 1)
        if first == "decoder":
            for new, old in OLD.items():
                if new in rest:
                    rest = rest.replace(new, old)
                    break
            if names == "oldest":
                rest = rest.replace("self_attention.", "attention.")
            model.setdefault(body, {})[rest] = values
        elif first == "embedding":
            table, weight = rest.split(".")
            model.setdefault("embedding", {}).setdefault(table, {})[weight] = values
        else:
            model.setdefault(first, {})[rest] = values
    return model
