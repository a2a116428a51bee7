"""Megatron-LM's distributed checkpoints, in and out: against megatron-core itself."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megalite.checkpoint.compatibility import function_of
from megalite.checkpoint.tensors import Kind
from megalite.config import ModelConfig
from megalite.conversion import megatron
from megalite.conversion.megatron import open_megatron, write_megatron
from megalite.conversion.opened import OpenedModel, logical_tensors
from megalite.conversion.verification import logits
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from tests.harness import megatron_core
from tests.harness.rank_pool import RankPools
from tests.harness.tool import run_tool
from tests.harness.wide import wide_except

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # it says so even where that is asked
]

TOLERANCE = 1e-5  # of logits of about 1, in fp32, from two implementations
GPT2 = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, ffn_hidden_size=40, max_position_embeddings=32, vocab_size=53,
    make_vocab_size_divisible_by=8, hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
LLAMA = replace(
    GPT2, num_layers=3, group_query_attention=True, num_query_groups=2, kv_channels=10, position_embedding_type="rope",
    rotary_base=20000.0, use_rope_scaling=True, rope_scaling_factor=4.0, normalization="RMSNorm", norm_epsilon=1e-6,
    qk_layernorm=True, swiglu=True, add_bias_linear=False, untie_embeddings_and_output_weights=True,
)  # fmt: skip
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "biases": replace(
        LLAMA, normalization="LayerNorm", add_qkv_bias=True, swiglu=False, exact_gelu=True, use_rope_scaling=False,
        rotary_seq_len_interpolation_factor=2.0, rotary_percent=0.6, rotary_interleaved=True, num_query_groups=4,
    ),
    "yarn": replace(
        LLAMA, position_embedding_type="yarn", use_rope_scaling=False, rotary_scaling_factor=4.0, mscale=1.2,
        yarn_original_max_position_embeddings=8, add_bias_linear=True, num_query_groups=1, qk_layernorm=False,
    ),
    "gated output": replace(LLAMA, attention_output_gate=True, add_qkv_bias=True, use_rope_scaling=False),
    "some layers rotated": replace(LLAMA, no_rope_freq="[0,1,0]"),
    "sinks": replace(LLAMA, softmax_type="learnable", qk_layernorm=False),
    "off by one": replace(GPT2, softmax_type="off-by-one", attention_output_gate=True),
    "squared-relu": replace(
        GPT2, squared_relu=True, position_embedding_type="none", max_position_embeddings=None, qk_layernorm=True,
    ),
}  # fmt: skip
LATENT = replace(
    LLAMA, multi_latent_attention=True, group_query_attention=False, num_query_groups=1, kv_channels=None,
    q_lora_rank=12, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8, use_rope_scaling=False,
)  # fmt: skip
LATENTS = {
    "yarn": replace(
        LATENT, position_embedding_type="yarn", rotary_scaling_factor=40.0, mscale=0.7, mscale_all_dim=0.4,
        yarn_original_max_position_embeddings=4096,
    ),
    "queries of the input": replace(LATENT, q_lora_rank=None, v_head_dim=12),
    "a table and biases": replace(
        LATENT, position_embedding_type="learned_absolute", normalization="LayerNorm", add_bias_linear=True,
    ),
    "without norms": replace(LATENT, qk_layernorm=False),
}  # fmt: skip
EXPERTS = {
    "mixtral": replace(LLAMA, num_experts=4, moe_router_topk=2, use_rope_scaling=False, qk_layernorm=False),
    "experts of some layers": replace(
        LLAMA, num_experts=6, moe_layer_freq="[0,1,1]", moe_ffn_hidden_size=12, moe_router_topk=4,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=3,
        moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5,
        moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True,
    ),
    "experts without a gate": replace(
        GPT2, squared_relu=True, add_bias_linear=False, num_experts=4, moe_router_topk=1, moe_router_pre_softmax=True,
        moe_shared_expert_intermediate_size=20,
    ),
}  # fmt: skip
SMALL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
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
    """Return the arguments that Megatron-LM has for this network, from its flags."""
    names = """num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels group_query_attention
        num_query_groups max_position_embeddings position_embedding_type rotary_base rotary_percent rotary_interleaved
        rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor normalization norm_epsilon
        apply_layernorm_1p qk_layernorm swiglu squared_relu add_bias_linear add_qkv_bias make_vocab_size_divisible_by
        untie_embeddings_and_output_weights hidden_dropout attention_dropout vocab_size rotary_scaling_factor
        yarn_original_max_position_embeddings mscale mscale_all_dim
        num_experts moe_ffn_hidden_size moe_router_topk moe_router_score_function moe_router_pre_softmax
        moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias
        moe_shared_expert_intermediate_size moe_shared_expert_gate attention_output_gate
        softmax_type multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
        v_head_dim""".split()  # noqa: SIM905
    of_model = {name: getattr(model, name) for name in names}
    plain = not (model.exact_gelu or model.swiglu or model.squared_relu)
    layers = 1 if model.moe_layer_freq is None else [int(layer.feed_forward == "moe") for layer in model.layers]
    if model.has_latents and model.position_embedding_type == "yarn":
        of_model["position_embedding_type"] = "rope"
    of_model["no_rope_freq"] = [int(not layer.rotary) for layer in model.layers] if model.no_rope_freq else None
    of_run = {"bias_gelu_fusion": plain, "seq_length": 32, "lr": 1e-3, "padding": object}
    return of_model | of_run | {"moe_layer_freq": layers, "moe_router_load_balancing_type": "aux_loss"}


def close(ours: Tensor, theirs: Tensor) -> None:
    size = theirs.abs().max().item()
    assert size > 0.5
    assert (ours - theirs).abs().max().item() < TOLERANCE * max(size, 1.0)


# ------------------------------------------------------------------------------------------------ against megatron-core


@pytest.mark.parametrize("name", wide_except([*MODELS, *EXPERTS], [*[*MODELS][::3], *[*EXPERTS][::2]]))
def test_megatron_core_loads_what_is_written(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    model = (MODELS | EXPERTS)[name]
    opened = random_model(model)
    folder = write(opened, tmp_path, tensor_parallel_size=1)

    ((theirs, common),) = rank_pools(1).run(megatron_core.load, model, folder, TOKENS, 1)

    close(logits(opened, TOKENS), theirs[..., :53])
    assert common["iteration"] == 0
    assert common["checkpoint_version"] == 3.0
    assert vars(common["args"]).items() >= {"num_layers": opened.config.num_layers, "padded_vocab_size": 56}.items()


@pytest.mark.wide_except(
    "gpt2-stacked",
    "sinks-stacked",
    "some layers rotated-per layer",
    "llama-legacy",
    "gated output-legacy",
    "mixtral-stacked",
    "experts of some layers-per layer",
)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[pytest.mark.wide] * ((model + place) % len(forms) > 0))
        for models, forms in ((MODELS, ("stacked", "per layer", "legacy")), (EXPERTS, ("stacked", "per layer")))
        for place, form in enumerate(forms)
        for model, name in enumerate(models)
    ],
)
def test_what_megatron_core_saves_is_read(
    name: str, form: megatron_core.Form, rank_pools: RankPools, tmp_path: Path
) -> None:
    model, folder = (MODELS | EXPERTS)[name], tmp_path / "iter_0000007"
    (theirs,) = rank_pools(1).run(megatron_core.save, model, arguments(model), folder, TOKENS, 1, form)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")

    opened = open_megatron(tmp_path)

    close(logits(opened, TOKENS), theirs[..., :53])
    assert opened.config.vocab_size == 53
    assert opened.sequence_length == 32
    if form != "legacy":
        described = (folder / ".metadata").read_bytes()
        numbered = form == "per layer" or model.moe_layer_freq is not None
        assert (b"decoder.layers.1.self_attention.linear_proj.weight" in described) == numbered
        assert (b"pre_mlp_layernorm" in described) == (model.num_experts is not None and form == "per layer")
        assert (b"linear_fc1.weight_w" in described) == (form == "per layer" and model.swiglu)


@pytest.mark.parametrize("name", wide_except(LATENTS, ["yarn"]))
@pytest.mark.parametrize("form", ["stacked", "per layer"])
def test_latent_attention_of_megatron_core_is_read_and_written(
    name: str, form: megatron_core.Form, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Without Transformer Engine all norms are modules of their own; those of "per layer" have its names."""
    model, theirs = LATENTS[name], tmp_path / "theirs"
    (expected,) = rank_pools(1).run(megatron_core.save, model, arguments(model), theirs, TOKENS, 1, form)
    opened = open_megatron(theirs)
    close(logits(opened, TOKENS), expected[..., :53])

    folder = write(opened, tmp_path / "ours")
    ((again, _),) = rank_pools(1).run(megatron_core.load, model, folder, TOKENS, 1)
    assert torch.equal(again[..., :53], expected[..., :53]), "the weights are the same"


@pytest.mark.wide
@pytest.mark.parametrize("form", ["stacked", "legacy"])
def test_two_tensor_parallel_ranks_save_and_load(
    form: megatron_core.Form, rank_pools: RankPools, tmp_path: Path
) -> None:
    model, theirs = LLAMA, tmp_path / "theirs"
    (expected, _) = rank_pools(2).run(megatron_core.save, model, arguments(model), theirs, TOKENS, 2, form)
    opened = open_megatron(theirs)
    close(logits(opened, TOKENS), expected[..., :53])

    folder = write(opened, tmp_path / "ours", tensor_parallel_size=2)
    ((again, _), _) = rank_pools(2).run(megatron_core.load, model, folder, TOKENS, 2)

    assert torch.equal(again[..., :53], expected[..., :53]), "the weights are the same"
    weights = read(opened)
    for name, values in read(open_megatron(tmp_path / "ours")).items():
        assert torch.equal(values, weights[name]), name


# ------------------------------------------------------------------------------------------------ the vocabulary


def test_rows_that_pad_the_vocabulary_are_zeros_there_and_nowhere_here(tmp_path: Path) -> None:
    opened = random_model(replace(LLAMA, make_vocab_size_divisible_by=16))
    folder = write(opened, tmp_path, tensor_parallel_size=2)
    tables = {name: torch.empty(64, 24) for name in ("embedding.word_embeddings.weight", "output_layer.weight")}
    dcp.load(tables, checkpoint_id=folder, no_dist=True)
    for values, name in zip(tables.values(), ("embedding.word", "output"), strict=True):
        assert torch.equal(values[:53], read(opened)[name])
        assert not values[53:].any()

    assert open_megatron(tmp_path).config.vocab_size == 53
    assert open_megatron(tmp_path, true_vocab_size=60).source.tensors["output"].shape == (60, 24)
    with pytest.raises(CheckpointError, match="64 rows for 65 tokens: give their number by --true-vocab-size"):
        open_megatron(tmp_path, true_vocab_size=65)


# ------------------------------------------------------------------------------------------------ a folder, or none


def test_a_folder_is_a_release_that_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = random_model(GPT2, torch.bfloat16)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(CheckpointError, match="No space left"):
            write(opened, tmp_path)
    assert list(tmp_path.iterdir()) == []

    folder = write(opened, tmp_path)

    assert folder == tmp_path / "release"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_checkpointed_iteration.txt", "release"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    for name, values in read(open_megatron(folder)).items():
        assert values.dtype == torch.bfloat16
        assert torch.equal(values, read(opened)[name]), name
    with pytest.raises(CheckpointError, match="has a checkpoint already"):
        write(opened, tmp_path)


@pytest.mark.wide
def test_a_stacked_tensor_saved_in_one_chunk_is_read_by_layers(tmp_path: Path) -> None:
    """Read such a tensor, as tools write it that do not know Megatron-LM."""
    opened = random_model(LLAMA)
    folder = write(opened, tmp_path)
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    shutil.copy(folder / "metadata.json", tmp_path)
    shutil.copy(folder / "common.pt", tmp_path)
    dcp.save(torch.load(tmp_path / "all.pt"), checkpoint_id=tmp_path, no_dist=True)

    for name, values in read(open_megatron(tmp_path)).items():
        assert torch.equal(values, read(opened)[name]), name


def save_in_halves(path: Path, folder: Path) -> None:
    """Half of the layers on each of two ranks, as two stages of a pipeline hold them."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(values, mesh, [Shard(0)]) if name.startswith("decoder.layers.") else values
        for name, values in torch.load(path).items()
        if isinstance(values, Tensor)
    }
    dcp.save(state, checkpoint_id=folder)


@pytest.mark.wide
def test_each_stage_may_have_saved_several_layers_in_one_chunk(rank_pools: RankPools, tmp_path: Path) -> None:
    opened = random_model(replace(LLAMA, num_layers=4))
    folder = write(opened, tmp_path)
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    shutil.copy(folder / "metadata.json", tmp_path)
    shutil.copy(folder / "common.pt", tmp_path)
    rank_pools(2).run(save_in_halves, tmp_path / "all.pt", tmp_path)

    source, expected = open_megatron(tmp_path).source, read(opened)
    for name in sorted(expected, key=lambda name: name.split(".")[::-1]):  # the layers of a tensor one after the other
        values = torch.empty_like(expected[name])
        source.fill(name, Box.whole(tuple(values.shape)), values)
        assert torch.equal(values, expected[name]), name


def test_what_is_common_may_stand_among_the_tensors(tmp_path: Path) -> None:
    """Read the format that Megatron-LM saves since 2026."""
    folder = write(random_model(GPT2), tmp_path)
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    common = torch.load(folder / "common.pt", weights_only=False)
    shutil.copy(folder / "metadata.json", tmp_path)
    state = torch.load(tmp_path / "all.pt") | {"common_state/shard_0_1": common}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True, planner=DefaultSavePlanner(flatten_state_dict=False))

    assert function_of(open_megatron(tmp_path).config) == function_of(GPT2)


def test_large_networks_are_in_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "FILE", 5000)
    opened = random_model(LLAMA)

    folder = write(opened, tmp_path)

    sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
    assert len(sizes) > 8
    assert max(sizes) < 20000
    for name, values in read(open_megatron(tmp_path)).items():
        assert torch.equal(values, read(opened)[name]), name


def test_the_tool_converts_there_and_back(tmp_path: Path) -> None:
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    write(random_model(replace(LLAMA, make_vocab_size_divisible_by=16)), theirs, tensor_parallel_size=2)

    read_ = run_tool(
        "convert", "--loader", "megatron", "--saver", "megalite", "--load-dir", theirs,
        "--save-dir", ours, "--true-vocab-size", 53, "--verify",
    )  # fmt: skip
    written = run_tool(
        "convert", "--loader", "megalite", "--saver", "megatron", "--load-dir", ours,
        "--save-dir", back, "--target-tensor-parallel-size", 2,
    )  # fmt: skip

    assert "verified: 30 of 30 tensors are the same bit for bit" in read_.stdout, read_
    assert f"{back / 'release'}: from megalite" in written.stdout, written
    files = [folder / "release" / "__0_0.distcp" for folder in (theirs, back)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_latent_experts_and_offsets_of_quantiles_go_there_and_back(tmp_path: Path) -> None:
    """The wheel's Megatron-LM has neither; the names are those of its newer versions."""
    model = replace(
        EXPERTS["mixtral"], moe_latent_size=6, moe_router_score_function="sqrtsoftplus", moe_router_topk=3,
        moe_router_load_balancing_type=("quantile_balancing",),
    )  # fmt: skip
    opened = random_model(model)
    write(opened, tmp_path)
    again = open_megatron(tmp_path)
    assert function_of(again.config) == function_of(model)
    found = read(again)
    for name, values in read(opened).items():
        assert torch.equal(found[name], values), name
    (folder,) = (path.parent for path in tmp_path.glob("*/.metadata"))
    names = {name.partition(".mlp.")[2] for name in FileSystemReader(folder).read_metadata().state_dict_metadata}
    assert {"router.qb_beta", "fc1_latent_proj.weight", "fc2_latent_proj.weight"} <= names
