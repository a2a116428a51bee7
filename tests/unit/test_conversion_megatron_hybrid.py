"""Megatron-LM's checkpoints of patterns, in and out, by its names; megatron-core judges them in `tests/oracles`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig
from megalite.conversion.megatron import open_megatron, write_megatron
from megalite.conversion.megatron_arguments import argument_fates, arguments_of, model_of
from megalite.errors import CheckpointError
from tests.unit.test_conversion_megatron import LLAMA, Weights, random_model, read, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it says so even where that is asked

PLAIN = replace(LLAMA, qk_layernorm=False, use_rope_scaling=False)
RECURRENT = {"mamba_head_dim": 8, "mamba_state_dim": 4, "mamba_num_groups": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8}
LATENTS: dict[str, Any] = {
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
    "group_query_attention": False, "num_query_groups": 1, "kv_channels": None, "qk_layernorm": True,
}  # fmt: skip
INDEXER: dict[str, Any] = {
    "dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 6, "dsa_indexer_topk": 5, "dsa_indexer_k_norm_epsilon": 1e-6,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "M": RECURRENT, "G": DELTA, "+": LATENTS, "D": LATENTS | INDEXER | {"qk_layernorm": False},
    "E": {"num_experts": 4, "moe_ffn_hidden_size": 16},
}  # fmt: skip
YARN = {"position_embedding_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.4}


def pattern(letters: str) -> ModelConfig:
    options = {name: value for letter, each in OPTIONS.items() if letter in letters for name, value in each.items()}
    return replace(PLAIN, num_layers=len(letters), hybrid_layer_pattern=letters, **options)


def latent_gpt(**options: Any) -> ModelConfig:
    return replace(PLAIN, multi_latent_attention=True, **LATENTS | options)


def sparse_gpt(**options: Any) -> ModelConfig:
    return latent_gpt(experimental_attention_variant="dsa", **INDEXER | options)


@pytest.mark.parametrize(
    ("letters", "options"),
    [
        *(("M*-G", {}), ("*E-*", {}), ("**--", {}), ("*E", {"moe_latent_size": 8})),
        *(("+-", {}), ("M+-+", {"q_lora_rank": None}), ("+E", {"qk_layernorm": False})),
        *(("D-DE", {}), ("MD-+", {"q_lora_rank": None, "dsa_indexer_scoring_relu": False})),
    ],
)
def test_a_pattern_is_read_as_it_was_written(letters: str, options: dict[str, Any], tmp_path: Path) -> None:
    opened = random_model(replace(pattern(letters), **options))
    write(opened, tmp_path)
    again = open_megatron(tmp_path)
    assert function_of(again.config) == function_of(opened.config)
    weights = read(opened)
    for name, values in read(again).items():
        assert torch.equal(values, weights.pop(name)), name
    assert not weights


def test_linear_attention_in_blocks_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A GPT keeps its layers: both halves have the index of their block."""
    variant = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "3"}
    opened = random_model(replace(PLAIN, num_layers=3, **variant, **DELTA))
    folder = write(opened, tmp_path)
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert "decoder.layers.1.self_attention.in_proj.layer_norm_weight" in names
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in names
    assert "decoder.final_layernorm.weight" in names
    again, weights = open_megatron(tmp_path), read(opened)
    assert function_of(again.config) == function_of(opened.config)
    assert all(torch.equal(values, weights[name]) for name, values in read(again).items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_lora_rank": None},
        {"qk_layernorm": False, "v_head_dim": 12},
        {"normalization": "LayerNorm", "add_bias_linear": True, "position_embedding_type": "learned_absolute"},
        YARN | {"yarn_original_max_position_embeddings": 4096},
        {"num_experts": 4, "moe_layer_freq": "[0,1,1]"},
    ],
)
def test_latent_attention_in_blocks_is_read_as_it_was_written(options: dict[str, Any], tmp_path: Path) -> None:
    opened = random_model(latent_gpt(**options))
    write(opened, tmp_path)
    again, weights = open_megatron(tmp_path), read(opened)
    assert function_of(again.config) == function_of(opened.config)
    for name, values in read(again).items():
        assert torch.equal(values, weights.pop(name)), name
    assert not weights


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None, "qk_layernorm": False}])
def test_latent_attention_has_the_names_and_the_rows_of_megatron(options: dict[str, Any], tmp_path: Path) -> None:
    """Both parts of a head follow each other; norms are those of the matrices behind them, but for the first one."""
    opened = random_model(latent_gpt(**options))
    folder = write(opened, tmp_path / "fused")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    state, ours = torch.load(tmp_path / "all.pt"), read(opened)
    layer, its = "decoder.layers.self_attention.", "layers.1.latent_attention."
    assert torch.equal(state["decoder.layers.input_layernorm.weight"][1], ours["layers.1.latent_attention_norm.weight"])
    up, whole = state[layer + "linear_kv_up_proj.weight"], ours[its + "key_value_up"]
    assert torch.equal(up[1].view(4, 6 + 8, 10), whole)
    assert torch.equal(state[layer + "linear_kv_down_proj.weight"][1], ours[its + "key_value_down"])
    assert torch.equal(state[layer + "linear_proj.weight"][1].view(24, 4, 8), ours[its + "output"])
    names = {name.removeprefix(layer) for name in state if name.startswith(layer)}
    if not options:
        assert torch.equal(state[layer + "linear_q_up_proj.weight"][1].view(4, 6 + 4, 12), ours[its + "query_up"])
        assert torch.equal(state[layer + "linear_q_up_proj.layer_norm_weight"][1], ours[its + "query_norm.weight"])
        assert torch.equal(state[layer + "linear_kv_up_proj.layer_norm_weight"][1], ours[its + "key_value_norm.weight"])
        assert "linear_q_down_proj.weight" in names
    else:
        assert torch.equal(state[layer + "linear_q_proj.weight"][1].view(4, 6 + 4, 24), ours[its + "query"])
        assert not [name for name in names if "norm" in name or "linear_q_down" in name]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_lora_rank": None, "qk_layernorm": False, "dsa_indexer_rope_interleaved": True},
        {"apply_layernorm_1p": True, "dsa_indexer_k_norm_epsilon": None, "mtp_num_layers": 1},
        {"num_experts": 4, "moe_layer_freq": "[0,1,1]", "dsa_indexer_scoring_relu": False},
        {"dsa_indexer_topk_freq": 2, "dsa_indexer_loss_coeff": 0.5, "dsa_indexer_use_sparse_loss": True},
    ],
)
def test_sparse_attention_in_blocks_is_read_as_it_was_written(options: dict[str, Any], tmp_path: Path) -> None:
    opened = random_model(sparse_gpt(**options))
    write(opened, tmp_path)
    again, weights = open_megatron(tmp_path), read(opened)
    assert function_of(again.config) == function_of(opened.config)
    assert again.config.dsa_indexer_loss_coeff == opened.config.dsa_indexer_loss_coeff
    for name, values in read(again).items():
        assert torch.equal(values, weights.pop(name)), name
    assert not weights


INDEXER_SHAPES = {"linear_wq_b.weight": (3 * 6, 12), "linear_wk.weight": (6, 24), "linear_weights_proj.weight": (3, 24)}
INDEXER_SHAPES |= {"k_norm.weight": (6,), "k_norm.bias": (6,)}
"""Megatron-LM's, in `DSAIndexer`. It needs Transformer Engine, and is not built here."""


def test_sparse_attention_has_the_names_and_shapes_of_megatrons_source(tmp_path: Path) -> None:
    """Norms of latents are modules of their own, and layers without an indexer are not stacked with the others."""
    folder = write(random_model(sparse_gpt()), tmp_path / "all")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    state, ours = torch.load(tmp_path / "all.pt"), read(random_model(sparse_gpt()))
    layer, its = "decoder.layers.self_attention.", "layers.1.latent_attention."
    begin = f"{layer}core_attention.indexer."
    shapes = {name.removeprefix(begin): tuple(state[name].shape) for name in state if name.startswith(begin)}
    assert shapes == {name: (3, *shape) for name, shape in INDEXER_SHAPES.items()}
    assert torch.equal(state[begin + "linear_wq_b.weight"][1].view(3, 6, 12), ours[its + "indexer.query"])
    assert torch.equal(state[begin + "linear_weights_proj.weight"][1], ours[its + "indexer.weights"])
    assert torch.equal(state[layer + "q_layernorm.weight"][1], ours[its + "query_norm.weight"])
    assert torch.equal(state[layer + "kv_layernorm.weight"][1], ours[its + "key_value_norm.weight"])
    assert torch.equal(state["decoder.layers.input_layernorm.weight"][1], ours["layers.1.latent_attention_norm.weight"])
    assert not [name for name in state if "layer_norm_weight" in name and "self_attention" in name]
    folder = write(random_model(sparse_gpt(dsa_indexer_topk_freq=2)), tmp_path / "shared")
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    of_indexers = {name.partition(".self_attention.")[0] for name in names if ".indexer." in name}
    assert of_indexers == {"decoder.layers.0", "decoder.layers.2"}
    folder = write(random_model(replace(pattern("D-D-"), dsa_indexer_topk_freq=3)), tmp_path / "pattern")
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {name.partition(".self_attention.")[0] for name in names if ".indexer." in name} == {"decoder.layers.0"}


def test_arguments_of_runs_with_sparse_attention_are_megatrons() -> None:
    written = vars(arguments_of(sparse_gpt(dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1), {}, 32, 56))
    assert written["experimental_attention_variant"] == "dsa"
    assert written["multi_latent_attention"] is True
    assert {name: written[name] for name in INDEXER} == INDEXER
    assert (written["dsa_indexer_topk_freq"], written["dsa_indexer_skip_topk_offset"]) == (2, 1)
    run = {"dsa_indexer_rotate_activation": True, "dsa_indexer_k_norm_fp32": True, "dsa_kernel_backend": "tilelang"}
    assert model_of(written | run) == model_of(written)
    assert {fate.kind for fate in argument_fates(written | run)} == {"used", "noted"}
    assert "unknown" not in "".join(fate.why for fate in argument_fates(run))
    of_pattern = vars(arguments_of(pattern("D-"), {}, 32, 56))
    assert of_pattern["hybrid_layer_pattern"] == "D-"
    assert of_pattern["dsa_indexer_topk"] == 5


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (replace(pattern("D-"), qk_layernorm=True), "--qk-layernorm with D in --hybrid-layer-pattern: Megatron-LM's"),
        (sparse_gpt(dsa_indexer_topk_freq=2, mtp_num_layers=2), "--dsa-indexer-topk-freq 2 with several depths"),
        (sparse_gpt(add_bias_linear=True), "--add-bias-linear with sparse attention: Megatron-LM has no such"),
        (sparse_gpt(latent_norm_epsilon=1e-3), "--latent-norm-epsilon 0.001 "),
    ],
)
def test_sparse_attention_that_megatron_has_not_is_not_written(model: ModelConfig, problem: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        arguments_of(model, {}, 32, 56)
    assert problem in str(raised.value)


def test_arguments_of_runs_with_latent_attention_say_how_it_is_rotated() -> None:
    """Megatron-LM rotates it by YaRN, whatever the positions of the network, and reads no option of other rotations."""
    written = vars(arguments_of(latent_gpt(), {}, 32, 56)) | {"rotary_percent": 0.5, "use_rope_scaling": True}
    plain = model_of(written)
    assert (plain.position_embedding_type, plain.rotary_percent, plain.use_rope_scaling) == ("rope", 1.0, False)
    without = {"position_embedding_type": "none", "use_rotary_position_embeddings": False}
    assert model_of(written | without) == plain
    scaled = {"rotary_scaling_factor": 40, "mscale_all_dim": 1.0}
    yarn = model_of(written | scaled)
    assert (yarn.position_embedding_type, yarn.yarn_original_max_position_embeddings) == ("yarn", 4096)
    assert (yarn.rotary_scaling_factor, yarn.mscale_all_dim) == (40, 1.0)
    assert model_of(written | scaled | {"yarn_original_max_position_embeddings": 64}) == yarn
    of_type = written | {"rotary_percent": 1.0, "rotary_scaling_factor": 40, "rope_type": "rope"}
    assert function_of(model_of(of_type)) == function_of(plain)
    for name, value, problem in (
        ("rope_type", "linear", "--rope-type 'linear': megalite has no such network"),
        ("position_embedding_type", "yarn", "--position-embedding-type yarn with latent attention: Megatron-LM has no"),
        ("position_embedding_type", "learned_absolute", "YaRN beside a table of positions is not supported"),
        ("rotary_interleaved", True, "--rotary-interleaved with --position-embedding-type yarn: Megatron-LM has no"),
        ("attention_output_gate", True, "--attention-output-gate with latent attention: Megatron-LM has no such"),
    ):
        with pytest.raises(CheckpointError) as raised:
            model_of(written | scaled | {"use_rotary_position_embeddings": False, name: value})
        assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"position_embedding_type": "none"}, "--position-embedding-type none .there: rope."),
        (
            YARN | {"yarn_original_max_position_embeddings": 64},
            "--yarn-original-max-position-embeddings 64 .there: 4096",
        ),
        (YARN | {"yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 16.0}, "--yarn-beta-fast 16.0 "),
        ({"latent_norm_epsilon": 1e-3}, "--latent-norm-epsilon 0.001 "),
        ({"attention_output_gate": True}, "--attention-output-gate with latent attention: Megatron-LM has no such"),
    ],
)
def test_latent_attention_that_megatron_has_not_is_not_written(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        arguments_of(latent_gpt(**options), {}, 32, 56)


@pytest.mark.parametrize(
    ("decays", "dtype"), [(torch.float32, None), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize(
    ("model", "count"),
    [
        (pattern("M*-G"), 5),
        (replace(PLAIN, experimental_attention_variant="gated_delta_net", linear_attention_freq="3", **DELTA), 4),
    ],
    ids=["pattern", "gpt"],
)
def test_decays_are_written_in_fp32(
    model: ModelConfig, count: int, decays: torch.dtype, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    random = random_model(model)
    precise = {name for name in random.source.tensors if name.endswith(("A_log", "dt_bias", ".D"))}
    values = {name: each.to(decays if name in precise else torch.bfloat16) for name, each in read(random).items()}
    opened = replace(random, source=Weights(values))
    assert opened.dtype == torch.bfloat16
    write_megatron(opened, tmp_path, dtype=dtype, tensor_parallel_size=1, workers=1, advance=lambda _: None)
    again = open_megatron(tmp_path)
    weights = read(again)
    assert len(precise) == count
    assert again.dtype == (dtype or torch.bfloat16)
    kinds = {name: each.dtype for name, each in weights.items()}
    assert kinds == {name: torch.float32 if name in precise else dtype or torch.bfloat16 for name in weights}
    assert all(torch.equal(weights[name], values[name].float()) for name in precise)


def test_layers_have_the_names_of_their_places(tmp_path: Path) -> None:
    """A layer of each letter has its index in its names, and no axis for the layers; parts are apart."""
    folder = write(random_model(pattern("-M*G")), tmp_path)
    found = {
        key: tuple(kind.size) for key, kind in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    }
    assert found["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] == (24,)
    assert found["decoder.layers.1.mixer.in_proj.layer_norm_weight"] == (24,)
    assert found["decoder.layers.1.mixer.in_proj.weight.z"] == (48, 24)
    assert found["decoder.layers.1.mixer.in_proj.weight.B"] == (8, 24)
    assert found["decoder.layers.1.mixer.conv1d.weight.C"] == (8, 1, 4)
    assert found["decoder.layers.1.mixer.conv1d.bias.x"] == (48,)
    assert found["decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"] == (24,)
    assert found["decoder.layers.3.self_attention.in_proj.layer_norm_weight"] == (24,)
    assert found["decoder.layers.3.self_attention.in_proj.weight.alpha"] == (4, 24)
    assert found["decoder.layers.3.self_attention.conv1d.weight.value"] == (32, 1, 4)
    assert found["decoder.final_norm.weight"] == (24,)


def test_norms_of_their_own_are_the_fused_ones(tmp_path: Path) -> None:
    """Read the names that norms have without Transformer Engine."""
    check_own_norms(
        pattern("M*-GE"),
        {
            "decoder.layers.0.mixer.in_proj.layer_norm_weight": "decoder.layers.0.norm.weight",
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.1.input_layernorm.weight",
            "decoder.layers.2.mlp.linear_fc1.layer_norm_weight": "decoder.layers.2.pre_mlp_layernorm.weight",
            "decoder.layers.3.self_attention.in_proj.layer_norm_weight": "decoder.layers.3.input_layernorm.weight",
        },
        tmp_path,
    )


def test_norms_of_latents_that_are_not_fused_are_read(tmp_path: Path) -> None:
    attention = "decoder.layers.0.self_attention."
    check_own_norms(
        pattern("+-"),
        {
            attention + "linear_q_up_proj.layer_norm_weight": attention + "q_layernorm.weight",
            attention + "linear_kv_up_proj.layer_norm_weight": attention + "kv_layernorm.weight",
        },
        tmp_path,
    )


def test_a_norm_of_the_input_of_queries_is_refused(tmp_path: Path) -> None:
    """Newer versions have one without a rank of queries."""
    folder = write(random_model(latent_gpt(q_lora_rank=None)), tmp_path / "plain")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    state["decoder.layers.self_attention.linear_q_proj.layer_norm_weight"] = torch.ones(3, 24)
    dcp.save(state, checkpoint_id=tmp_path / "more", no_dist=True)
    for name in ("metadata.json", "common.pt"):
        shutil.copy(folder / name, tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"has decoder\.layers\.0\.self_attention\.linear_q_proj\.layer_norm_w"):
        open_megatron(tmp_path / "more")


def check_own_norms(model: ModelConfig, names: dict[str, str], tmp_path: Path) -> None:
    """Check that a checkpoint with other names is read as the one that was written. `names`: by the written ones."""
    opened = random_model(model)
    folder = write(opened, tmp_path / "fused")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    (own := tmp_path / "own").mkdir()
    shutil.copy(folder / "metadata.json", own)
    shutil.copy(folder / "common.pt", own)
    state = torch.load(tmp_path / "all.pt")
    assert names.keys() <= state.keys()
    dcp.save({names.get(key, key): values for key, values in state.items()}, checkpoint_id=own, no_dist=True)
    weights = read(opened)
    for name, values in read(open_megatron(own)).items():
        assert torch.equal(values, weights[name]), name


def test_arguments_of_runs_describe_patterns() -> None:
    """Read both names of the pattern, with stages, and what else a run with one has."""
    written = vars(arguments_of(pattern("M*-G"), {}, 32, 56))
    assert written["hybrid_layer_pattern"] == "M*-G"
    assert written["spec"] == ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    of_run = {"moe_layer_freq": 1, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
    old = written | of_run | {"hybrid_layer_pattern": None, "hybrid_override_pattern": "M*|-G", "num_layers": None}
    assert model_of(old) == replace(model_of(written), vocab_size=None)
    assert {fate.kind for fate in argument_fates(old)} == {"used", "noted"}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"hybrid_layer_pattern": "M*D-"}, "sparse attention needs --dsa-indexer-n-heads"),
        ({"hybrid_layer_pattern": "M*/*/-"}, "has the depths '*' and '-': give all of them the same letters"),
        ({"hybrid_layer_pattern": 7}, "--hybrid-layer-pattern 7: megalite has no such network"),
        ({"hybrid_layer_pattern": None}, "--is-hybrid-model True: megalite has no such network"),
        ({"spec": ["my.layers", "spec"]}, "--spec"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1: give the letters of a depth in --hybrid-layer-pattern"),
        ({"mtp_hsm": True}, "--mtp-hsm True: megalite has no such network"),
        ({"normalization": "LayerNorm"}, "a gated delta net without --normalization RMSNorm, or with"),
        ({"apply_layernorm_1p": True}, "RMSNorm, or with --apply-layernorm-1p: its norm is the network's in Megatron"),
        ({"swiglu": False, "squared_relu": True}, "a gated delta net without --swiglu"),
        ({"mamba_num_groups": 5}, "is not a multiple of --mamba-num-groups 5"),
    ],
)
def test_other_patterns_are_refused(changed: dict[str, Any], problem: str) -> None:
    written = vars(arguments_of(pattern("M*-G"), {}, 32, 56))
    with pytest.raises(CheckpointError) as raised:
        model_of(written | changed)
    assert problem in str(raised.value)


@pytest.mark.parametrize("letters", ["K*-", "*-L"])
def test_letters_of_megalites_own_are_not_written(letters: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--hybrid-layer-pattern with [KL]: such layers are not converted"):
        write(random_model(pattern(letters)), tmp_path)


def test_what_megatron_has_otherwise_is_not_written() -> None:
    """Such a network is one of megalite, so the error does not say that it has none."""
    for option in ({"normalization": "LayerNorm"}, {"apply_layernorm_1p": True}, {"swiglu": False}):
        with pytest.raises(CheckpointError, match=r"a gated delta net with.* in Megatron-LM, .* in megalite") as raised:
            arguments_of(replace(pattern("M*-G"), **option), {}, 32, 56)
        assert "megalite has no" not in str(raised.value)


def test_what_megatron_has_no_argument_for_is_not_written() -> None:
    for option in ({"mamba_dt_min": 0.001}, {"mamba_conv_kernel_dim": 3}, {"linear_allow_neg_eigval": True}):
        with pytest.raises(CheckpointError, match=r"Megatron-LM has no such network:\n  --"):
            arguments_of(replace(pattern("M*-G"), **option), {}, 32, 56)
