"""Whole weights: where they come from, a rank's part of them, and the files that they go to."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from museum.plain.network import EMBEDDING, HEAD, Stage, name_in_files
from museum.plain.ranks import Ranks
from museum.plain.settings import EPSILON, ROTARY_BASE, Settings
from museum.plain.tensor_parallel import Part


def initial_weights(settings: Settings) -> dict[str, Tensor]:
    """Return whole weights by name, each from a seed of its own, so that no layout changes them."""
    rows = settings.key_value_heads * settings.head
    hidden = settings.hidden
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (settings.vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not settings.tied:
        shapes[HEAD] = settings.vocabulary, hidden
    for number in range(settings.layers):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (rows, hidden) for name in "kv"}
        if settings.qk_norm:
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (settings.head,) for name in "qk"}
        shapes |= _of_mlps(f"{layer}.", settings)
    return {name: _drawn(name, shape, settings).to(settings.weight_dtype) for name, shape in shapes.items()}


def _of_mlps(layer: str, settings: Settings) -> dict[str, tuple[int, ...]]:
    shape = settings.ffn, settings.hidden
    if not settings.experts:
        return {
            f"{layer}mlp.gate_proj.weight": shape,
            f"{layer}mlp.up_proj.weight": shape,
            f"{layer}mlp.down_proj.weight": shape[::-1],
        }
    found: dict[str, tuple[int, ...]] = {f"{layer}block_sparse_moe.gate.weight": (settings.experts, settings.hidden)}
    for number in range(settings.experts):
        expert = f"{layer}block_sparse_moe.experts.{number}"
        found |= {f"{expert}.w1.weight": shape, f"{expert}.w2.weight": shape[::-1], f"{expert}.w3.weight": shape}
    return found


def _drawn(name: str, shape: tuple[int, ...], settings: Settings) -> Tensor:
    generator = torch.Generator().manual_seed(settings.seed + zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return 1.0 + 0.1 * values if len(shape) == 1 else values * settings.hidden**-0.5


def load_weights(folder: str) -> dict[str, Tensor]:
    """Return the whole weights of a checkpoint by name."""
    return load_file(Path(folder) / "model.safetensors")


def initial_weight(name: str, weights: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """Return the whole weight that a weight of a stage begins with."""
    return weights[name_in_files(name, settings)]


def initial_shard(whole: Tensor, part: Part, ranks: Ranks) -> Tensor:
    """Return a rank's part of a whole weight."""
    return whole if part.range is None else whole.narrow(*part.range)


def whole_weights(stage: Stage, ranks: Ranks) -> dict[str, Tensor]:
    """Return the whole weights of the model, put together from all ranks."""
    own = {name_in_files(name, ranks.settings): (each.part, each.detach()) for name, each in stage.weights()}
    everywhere: list[dict[str, tuple[Part, Tensor]]] = [{} for _ in range(ranks.world.size)]
    dist.all_gather_object(everywhere, own)
    found: dict[str, Tensor] = {}
    for of_rank in reversed(everywhere):  # of copies, the first rank's is taken
        for name, (part, values) in of_rank.items():
            whole = found.setdefault(name, torch.zeros(part.shape, dtype=values.dtype))
            (whole if part.range is None else whole.narrow(*part.range)).copy_(values)
    return found


def write_checkpoint(weights: Mapping[str, Tensor], settings: Settings, folder: Path) -> None:
    """Write a model of Hugging Face: Llama, Qwen3 (norms of queries and keys) or Mixtral (experts)."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "Mixtral" if settings.experts else "Qwen3" if settings.qk_norm else "Llama"
    config: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_size": settings.hidden,
        "intermediate_size": settings.ffn,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_value_heads,
        "head_dim": settings.head,
        "vocab_size": settings.vocabulary,
        "max_position_embeddings": settings.sequence,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": ROTARY_BASE,
        "tie_word_embeddings": settings.tied,
        "torch_dtype": str(settings.weight_dtype).replace("torch.", ""),
    }
    if settings.experts:
        config |= {"num_local_experts": settings.experts, "num_experts_per_tok": settings.top_k}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors")
