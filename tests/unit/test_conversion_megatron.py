"""Megatron-LM's distributed checkpoints, in and out: against megatron-core itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.source import Kind
from megalite.config import ModelConfig
from megalite.conversion.megatron import open_megatron, write_megatron
from megalite.conversion.opened import OpenedModel, logical_tensors
from megalite.conversion.verification import logits
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from tests.harness import megatron_core
from tests.harness.rank_pool import RankPools

TOLERANCE = 1e-5  # of logits of about 1, in fp32, from two implementations
GPT2 = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, ffn_hidden_size=40, max_position_embeddings=32, vocab_size=53,
    make_vocab_size_divisible_by=8, hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
LLAMA = replace(
    GPT2, num_layers=3, group_query_attention=True, num_query_groups=2, kv_channels=10, position_embedding_type="rope",
    rotary_base=500.0, use_rope_scaling=True, rope_scaling_factor=4.0, normalization="RMSNorm", norm_epsilon=1e-6,
    qk_layernorm=True, swiglu=True, add_bias_linear=False, untie_embeddings_and_output_weights=True,
)  # fmt: skip
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "biases": replace(
        LLAMA, normalization="LayerNorm", add_qkv_bias=True, swiglu=False, exact_gelu=True, use_rope_scaling=False,
        rotary_seq_len_interpolation_factor=2.0, rotary_percent=0.6, num_query_groups=4,
    ),
    "yarn": replace(
        LLAMA, position_embedding_type="yarn", use_rope_scaling=False, rotary_scaling_factor=4.0, mscale=1.2,
        yarn_original_max_position_embeddings=8, add_bias_linear=True, num_query_groups=1, qk_layernorm=False,
    ),
    "squared-relu": replace(
        GPT2, squared_relu=True, position_embedding_type="none", max_position_embeddings=None, qk_layernorm=True,
    ),
}  # fmt: skip
TOKENS = torch.arange(2 * 32).view(2, 32) * 7 % 53


class Weights:
    """Tensors in memory (a `Source`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.values = tensors
        self.tensors = {name: Kind(tuple(values.shape), values.dtype) for name, values in tensors.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        values.copy_(self.values[name][box.slices()])


def random_model(model: ModelConfig, dtype: torch.dtype = torch.float32) -> OpenedModel:
    """Nothing is at its initial value, so that no mistake hides."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in logical_tensors(model).items():
        weights[name] = torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
    return OpenedModel("random", model, Weights({name: each.to(dtype) for name, each in weights.items()}), {}, 32)


def read(opened: OpenedModel) -> dict[str, Tensor]:
    found = {name: torch.empty(kind.shape, dtype=kind.dtype) for name, kind in opened.source.tensors.items()}
    for name, values in found.items():
        opened.source.fill(name, Box.whole(tuple(values.shape)), values)
    return found


def write(opened: OpenedModel, folder: Path, tensor_parallel_size: int = 1) -> Path:
    return write_megatron(
        opened, folder, dtype=None, tensor_parallel_size=tensor_parallel_size, workers=2, advance=lambda _: None
    )


def arguments(model: ModelConfig) -> dict[str, Any]:
    """As Megatron-LM has them for this network, from its flags."""
    names = """num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels group_query_attention
        num_query_groups max_position_embeddings position_embedding_type rotary_base rotary_percent
        rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor normalization norm_epsilon
        apply_layernorm_1p qk_layernorm swiglu squared_relu add_bias_linear add_qkv_bias make_vocab_size_divisible_by
        untie_embeddings_and_output_weights hidden_dropout attention_dropout vocab_size rotary_scaling_factor
        yarn_original_max_position_embeddings mscale mscale_all_dim""".split()  # noqa: SIM905
    of_model = {name: getattr(model, name) for name in names}
    plain = not (model.exact_gelu or model.swiglu or model.squared_relu)
    return of_model | {"bias_gelu_fusion": plain, "seq_length": 32, "num_experts": None, "lr": 1e-3, "padding": object}


def close(ours: Tensor, theirs: Tensor) -> None:
    size = theirs.abs().max().item()
    assert size > 0.5
    assert (ours - theirs).abs().max().item() < TOLERANCE * max(size, 1.0)


# ------------------------------------------------------------------------------------------------ against megatron-core


@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_loads_what_is_written(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    opened = random_model(MODELS[name])
    folder = write(opened, tmp_path, tensor_parallel_size=1)

    ((theirs, common),) = rank_pools(1).run(megatron_core.load, MODELS[name], folder, TOKENS, 1)

    close(logits(opened, TOKENS), theirs[..., :53])
    assert common["iteration"] == 0
    assert common["checkpoint_version"] == 3.0
    assert vars(common["args"]).items() >= {"num_layers": opened.config.num_layers, "padded_vocab_size": 56}.items()


@pytest.mark.parametrize("name", MODELS)
def test_what_megatron_core_saves_is_read(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    model = MODELS[name]
    (theirs,) = rank_pools(1).run(
        megatron_core.save, model, arguments(model), tmp_path / "iter_0000007", TOKENS, 1, name == "llama"
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")

    opened = open_megatron(tmp_path)

    close(logits(opened, TOKENS), theirs[..., :53])
    assert opened.config.vocab_size == 53
    assert opened.sequence_length == 32


def test_two_tensor_parallel_ranks_save_and_load(rank_pools: RankPools, tmp_path: Path) -> None:
    model = LLAMA
    (theirs, _) = rank_pools(2).run(
        megatron_core.save, model, arguments(model), tmp_path / "theirs", TOKENS, 2, per_layer=False
    )
    opened = open_megatron(tmp_path / "theirs")
    close(logits(opened, TOKENS), theirs[..., :53])

    folder = write(opened, tmp_path / "ours", tensor_parallel_size=2)
    ((again, _), _) = rank_pools(2).run(megatron_core.load, model, folder, TOKENS, 2)

    assert torch.equal(again[..., :53], theirs[..., :53]), "the weights are the same"
    for name, values in read(open_megatron(tmp_path / "ours")).items():
        assert torch.equal(values, read(opened)[name]), name
