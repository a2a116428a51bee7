"""Pairs of a network's features and those of formats: weights go through three formats, and none changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig, ParallelConfig
from megalite.conversion.huggingface import open_huggingface, write_huggingface
from megalite.conversion.megatron import open_megatron, write_megatron
from megalite.conversion.native import open_megalite, write_megalite
from megalite.conversion.opened import OpenedModel
from megalite.conversion.vocabulary import with_more_tokens
from tests.harness.covering_array import Factors, Row, covering_array, every_value_once
from tests.harness.wide import wide_except
from tests.unit.test_conversion_megatron import GPT2, LLAMA, random_model, read

NETWORKS = {
    "gpt2": replace(GPT2, num_layers=4),
    "llama": replace(LLAMA, num_layers=4, qk_layernorm=False),
    "qwen2": replace(LLAMA, num_layers=4, qk_layernorm=False, add_qkv_bias=True, use_rope_scaling=False),
    "qwen3": replace(LLAMA, num_layers=4, use_rope_scaling=False),
    "mixtral": replace(
        LLAMA, num_layers=4, num_experts=4, moe_router_topk=2, use_rope_scaling=False, qk_layernorm=False
    ),
}
LAYOUTS = {
    "equal files": None,
    "tp2": ParallelConfig(tensor_model_parallel_size=2),
    "pp4": ParallelConfig(pipeline_model_parallel_size=4),
    "tp2-pp2-vpp2": ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2
    ),
    "zb-v": ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb-v"),
}
FORMATS = ("megalite", "huggingface", "megatron")
FACTORS: Factors = {
    "network": tuple(NETWORKS),
    "untied": (False, True),
    "groups": (1, 2, 4),
    "tokens": (53, 64, 7),
    "divisor": (1, 8, 128),
    "layout": tuple(LAYOUTS),
    "first": FORMATS,
    "second": FORMATS,
    "third": FORMATS,
    "tensor_ranks": (1, 2, 4),
    "dtype": (torch.float32, torch.bfloat16),
    "shard": (10**9, 3_000),
    "grown": (0, 1, 6),
}
"""`tokens` and `divisor`: of the vocabulary. `grown`: tokens that are added after the first format."""


def possible(row: Row) -> bool:
    """Tell whether a family of Hugging Face has the network."""
    return row["network"] != "gpt2" or (row["groups"] == 4 and not row["untied"])


def network(row: Row) -> ModelConfig:
    found = NETWORKS[row["network"]]
    grouped = row["groups"] < found.num_attention_heads
    return replace(
        found,
        untie_embeddings_and_output_weights=row["untied"],
        group_query_attention=grouped,
        num_query_groups=row["groups"] if grouped else 1,
        vocab_size=row["tokens"],
        make_vocab_size_divisible_by=row["divisor"],
    )


def through(opened: OpenedModel, form: str, folder: Path, row: Row) -> OpenedModel:
    """Write a model in a format, and open what has been written."""
    common = {"dtype": None, "workers": 1, "advance": lambda _: None}
    if form == "megalite":
        write_megalite(opened, folder, layout=LAYOUTS[row["layout"]], **common)
        return open_megalite(folder)
    if form == "huggingface":
        write_huggingface(opened, folder, shard=row["shard"], **common)
        return open_huggingface(folder)
    write_megatron(opened, folder, tensor_parallel_size=row["tensor_ranks"], **common)
    return open_megatron(folder)


def shown(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


ROWS = covering_array(FACTORS, possible, candidates=4)


@pytest.mark.wide_except(
    "mixtral-False-2-64-8-equal files-huggingface-megalite-megalite-1-torch.float32-3000-1",
    "qwen3-True-4-64-1-pp4-huggingface-megatron-megalite-1-torch.float32-3000-0",
    "llama-True-1-64-128-tp2-pp2-vpp2-megatron-huggingface-huggingface-1-torch.bfloat16-1000000000-1",
)
@pytest.mark.parametrize("row", wide_except(ROWS, every_value_once(ROWS)), ids=shown)
def test_formats_keep_all_of_a_model(row: Row, tmp_path: Path) -> None:
    opened = random_model(network(row), row["dtype"])
    before = read(opened)
    opened = through(opened, row["first"], tmp_path / "first", row)
    opened = with_more_tokens(opened, row["tokens"] + row["grown"])
    for place in ("second", "third"):
        opened = through(opened, row[place], tmp_path / place, row)
    assert opened.config.vocab_size == row["tokens"] + row["grown"]
    wanted = replace(network(row), vocab_size=opened.config.vocab_size)
    assert function_of(opened.config) == function_of(wanted)
    after = read(opened)
    assert after.keys() == before.keys()
    for name, values in before.items():
        found, rows = after[name], values.shape[0]
        assert found.dtype == values.dtype
        assert torch.equal(found[:rows], values), name
        mean = values.double().mean(0).to(values.dtype).expand_as(found[rows:])
        torch.testing.assert_close(found[rows:], mean, msg=name)
