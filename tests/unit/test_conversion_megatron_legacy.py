"""Megatron-LM's older checkpoints, of any layout and every generation of names, become the network that they are."""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import ModelConfig
from megalite.conversion.megatron import open_megatron
from megalite.errors import CheckpointError
from tests.harness import megatron_legacy
from tests.harness.megatron_legacy import Names
from tests.unit.test_conversion_megatron import GPT2, LLAMA, arguments, random_model, read

MANY: dict[str, Any] = {"deadline": None, "max_examples": 60}


@st.composite
def models(draw: st.DrawFn, tensor_ranks: int, layers: int) -> ModelConfig:
    groups = tensor_ranks * draw(st.integers(1, 2))
    heads = groups * draw(st.integers(1, 3))
    common = {
        "num_layers": layers,
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": groups,
        "hidden_size": heads * 3,
        "kv_channels": draw(st.sampled_from([4, 6])),
        "ffn_hidden_size": tensor_ranks * 5,
        "add_bias_linear": draw(st.booleans()),
        "untie_embeddings_and_output_weights": draw(st.booleans()),
        "vocab_size": 13,
    }
    model = replace(draw(st.sampled_from([GPT2, LLAMA])), **common)
    return replace(model, exact_gelu=not (model.swiglu or model.add_bias_linear))


@settings(**MANY | {"max_examples": 12})
@given(data=st.data())
def test_any_layout_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_any_layout(tmp_path_factory, data)


@pytest.mark.wide
@settings(**MANY)
@given(data=st.data())
def test_many_layouts_are_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_any_layout(tmp_path_factory, data)


def check_any_layout(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensor_ranks, pipeline_ranks, chunks = (data.draw(st.integers(1, most)) for most in (3, 3, 2))
    stages = [[data.draw(st.integers(1, 2)) for _ in range(pipeline_ranks)] for _ in range(chunks)]
    model = data.draw(models(tensor_ranks, sum(map(sum, stages))))
    names: Names = data.draw(st.sampled_from(["core", "local", "old", "oldest"]))
    opened = random_model(model, data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    weights, folder = read(opened), tmp_path_factory.mktemp("legacy")
    megatron_legacy.write(
        folder, model, weights, arguments(model), tensor_ranks=tensor_ranks, stages=stages, names=names,
        padding=-13 % tensor_ranks + tensor_ranks,
    )  # fmt: skip

    found = open_megatron(folder)

    assert read(found).keys() == weights.keys()
    for name, values in read(found).items():
        assert torch.equal(values, weights[name]), name
        assert values.dtype == weights[name].dtype
    assert found.config == replace(model, init_method_std=found.config.init_method_std)


def save(folder: Path, **options: Any) -> None:
    megatron_legacy.write(folder, GPT2, read(random_model(GPT2)), arguments(GPT2), **options)


def test_an_order_of_queries_keys_and_values_before_version_2_is_refused(tmp_path: Path) -> None:
    save(tmp_path, version=1.0)
    with pytest.raises(CheckpointError, match=r"has checkpoint_version 1\.0, whose queries, keys and values"):
        open_megatron(tmp_path)


def test_the_file_beside_a_distributed_optimizers_is_read(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").rename(tmp_path / "mp_rank_00" / "model_rng.pt")
    assert open_megatron(tmp_path).config.num_layers == 2


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    save(tmp_path, tensor_ranks=2, stages=[[1, 1]])
    shutil.rmtree(tmp_path / "mp_rank_01_000")
    with pytest.raises(CheckpointError, match="has no files of the ranks 01_000"):
        open_megatron(tmp_path)


def test_experts_of_many_ranks_are_refused(tmp_path: Path) -> None:
    save(tmp_path, stages=[[1, 1]])
    (tmp_path / "mp_rank_00_001").rename(tmp_path / "mp_rank_00_001_001")
    with pytest.raises(CheckpointError, match="several ranks with experts: they are read from torch_dist"):
        open_megatron(tmp_path)


def test_an_output_layer_that_is_not_the_embedding_is_refused_where_they_are_one(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    model = megatron_legacy.whole(GPT2, read(random_model(GPT2)), padding=3)
    state: dict[str, Any] = {"args": Namespace(**arguments(GPT2)), "checkpoint_version": 3.0, "model": model}
    path.parent.mkdir()
    word = model["embedding.word_embeddings.weight"]
    torch.save(state | {"model": model | {"output_layer.weight": word.clone()}}, path)
    open_megatron(tmp_path)

    torch.save(state | {"model": model | {"output_layer.weight": word + 1}}, path)
    with pytest.raises(CheckpointError, match=r"output_layer\.weight with other values"):
        open_megatron(tmp_path)


def test_the_network_must_be_the_one_that_the_arguments_describe(tmp_path: Path) -> None:
    megatron_legacy.write(tmp_path, GPT2, read(random_model(GPT2)), arguments(GPT2) | {"num_layers": 3})
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.2\.self_attention\.linear_qkv\.weight is missing"):
        open_megatron(tmp_path)
