"""The network is the one that Megatron-LM's arguments describe, or there is none, in and out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megalite.config import ModelConfig
from megalite.conversion.megatron import open_megatron
from megalite.conversion.megatron_arguments import arguments_of, model_of, tokenizer_of
from megalite.errors import CheckpointError
from tests.unit.test_conversion_megatron import GPT2, random_model, write

SMALL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it says so even where that is asked


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"use_parallel_residual": True}, "--use-parallel-residual True"),
        ({"scale_embeddings": True}, "--scale-embeddings"),
        ({"sandwich_norm": True}, "--sandwich-norm"),
        ({"output_norm_freq": "1"}, "--output-norm-freq"),
        ({"attn_logit_softcapping": 50.0}, "--attn-logit-softcapping 50.0"),
        ({"final_logit_softcapping": 30.0}, "--final-logit-softcapping"),
        ({"query_pre_attn_scalar": 7.0}, "--query-pre-attn-scalar"),
        ({"embedding_multiplier": 2.0}, "--embedding-multiplier 2.0"),
        ({"residual_multiplier": 0.5}, "--residual-multiplier 0.5"),
        ({"logits_scaling": 4.0}, "--logits-scaling 4.0"),
        ({"geglu": True}, "--geglu"),
        ({"add_bias_linear": False}, "--exact-gelu False"),
        ({"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_low_freq_factor": 2.0},
         "--rope-scaling-low-freq-factor 2.0 .there: 1.0."),
        ({"window_size": "8,0", "position_embedding_type": "rope", "window_rotary_base": 5.0}, "--window-rotary-base"),
    ],
)  # fmt: skip
def test_a_network_that_megatron_has_not_is_refused(changes: dict[str, Any], flag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"Megatron-LM has no such network:\n  {flag}"):
        write(random_model(replace(GPT2, **changes)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_yarn_of_neighbours_is_refused(tmp_path: Path) -> None:
    """Megatron-LM refuses it as soon as it builds the network."""
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 2.0, "yarn_original_max_position_embeddings": 8}
    with pytest.raises(CheckpointError, match="--rotary-interleaved with --position-embedding-type yarn: Megatron-LM"):
        write(random_model(replace(GPT2, **yarn, rotary_interleaved=True)), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_apply_probs_on_input", True),
        ("qk_l2_norm", True),
        ("mtp_num_layers", "1"),
        ("spec", ["some.module", "spec"]),
        ("apply_residual_connection_post_layernorm", True),
        ("position_embedding_type", "mrope"),
        ("normalization", "L2Norm"),
        ("hidden_size", None),
    ],
)
def test_arguments_of_another_network_are_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    folder = write(random_model(GPT2), tmp_path)
    common = torch.load(folder / "common.pt", weights_only=False)
    setattr(common["args"], name, value)
    torch.save(common, folder / "common.pt")

    with pytest.raises(CheckpointError, match=f"--{name.replace('_', '-')} "):
        open_megatron(tmp_path)


def test_tensors_that_the_network_has_not_are_refused_and_the_optimizers_left_aside(tmp_path: Path) -> None:
    folder = write(random_model(GPT2), tmp_path)
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    shutil.copy(folder / "metadata.json", tmp_path)
    shutil.copy(folder / "common.pt", tmp_path)
    state = torch.load(tmp_path / "all.pt") | {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    open_megatron(tmp_path)

    more = tmp_path / "more"
    dcp.save(state | {"decoder.layers.mlp.router.weight": torch.zeros(2, 3)}, checkpoint_id=more, no_dist=True)
    for name in ("metadata.json", "common.pt"):
        shutil.copy(folder / name, more)
    with pytest.raises(CheckpointError, match=r"has decoder.layers.0.mlp.router.weight, decoder.layers.1.mlp.router"):
        open_megatron(more)


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ({"window_size": (8, 0)}, ("8,0", None)),
        ({"window_size": (-1, 0)}, (None, None)),
        ({"window_size": [8, 0], "window_attn_skip_freq": [1, 0]}, ("8,0", "[1, 0]")),
        ({"window_size": "(8, 0)", "window_attn_skip_freq": 2}, ("(8, 0)", "2")),
    ],
)
def test_windows_are_read(arguments: dict[str, Any], window: tuple[str | None, str | None]) -> None:
    model = model_of(SMALL | {"position_embedding_type": "rope"} | arguments)
    assert (model.window_size, model.window_attn_skip_freq) == window
    assert model_of(vars(arguments_of(model, {}, 8, 8))).layers == model.layers


def test_the_tokenizer_is_told_and_a_null_tokenizer_has_one_token_more(tmp_path: Path) -> None:
    data = {"tokenizer_type": "NullTokenizer"}
    folder = write(replace(random_model(GPT2), data=data), tmp_path)

    assert vars(torch.load(folder / "common.pt", weights_only=False)["args"])["vocab_size"] == 52
    opened = open_megatron(tmp_path)
    assert opened.config.vocab_size == 53
    assert opened.data == data


def test_a_tokenizers_fields_are_its_own() -> None:
    of_all = {"tokenizer_model": "t.json", "tiktoken_num_special_tokens": 1000, "tokenizer_special_tokens": ["<s>"]}
    assert tokenizer_of(of_all | {"tokenizer_type": "HuggingFaceTokenizer"}) == {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "t.json",
    }
    assert tokenizer_of(of_all | {"tokenizer_type": "TikTokenizer"})["tokenizer_special_tokens"] == ("<s>",)
    assert tokenizer_of(of_all | {"tokenizer_type": "MultimodalTokenizer"}) == {}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"rotary_percent": 0.75}, "--rotary-percent 0.75 rotates 3 of 4 channels"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "megalite has one scaling"),
    ],
)
def test_rotations_that_differ_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        model_of(SMALL | {"position_embedding_type": "rope"} | arguments)


def test_older_arguments_are_understood() -> None:
    old = {
        "encoder_num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "layernorm_epsilon": 1e-6,
        "use_rotary_position_embeddings": True, "disable_bias_linear": True, "swiglu": True,
    }  # fmt: skip
    assert model_of(old) == ModelConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, norm_epsilon=1e-6, position_embedding_type="rope",
        add_bias_linear=False, swiglu=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_bias_linear": True}, "--num-experts with --add-bias-linear: biases of experts and routers are"),
        (
            {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_group_scores": 1},
            "Megatron-LM has no such network:\n  --moe-router-group-scores 1 \\(there: 2\\)",
        ),
    ],
)
def test_experts_that_megatron_has_not_are_refused(changes: dict[str, Any], words: str) -> None:
    experts = {
        "num_experts": 4,
        "swiglu": True,
        "add_bias_linear": False,
        "vocab_size": 8,
        "max_position_embeddings": 8,
    } | changes
    with pytest.raises(CheckpointError, match=words):
        arguments_of(ModelConfig(2, 8, 2, **experts), {}, 8, 8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk_scaling_factor": 2.5},
            "--moe-router-topk-scaling-factor needs another --moe-router-load-balancing-type than sinkhorn",
        ),
        ({"moe_router_load_balancing_type": ["none", "sinkhorn"]}, "--moe-router-load-balancing-type"),
        ({"moe_layer_freq": [1, 0, 1]}, r"--moe-layer-freq .* is for 3 layers, and the network has 2"),
        ({"moe_router_score_function": "relu"}, "--moe-router-score-function 'relu'"),
        ({"moe_layer_freq": {"a": 1}}, "--moe-layer-freq"),
        ({"num_experts": -4}, "--num-experts"),
        ({"moe_router_topk": 5}, "--moe-router-topk 5 is more than --num-experts 4"),
    ],
)
def test_arguments_of_other_experts_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        model_of(SMALL | {"num_experts": 4, "add_bias_linear": False, "max_position_embeddings": 8} | given)


def test_even_choices_have_the_weights_that_megatron_gives_them() -> None:
    """It has no arguments for them."""
    given = {"num_experts": 4, "add_bias_linear": False, "moe_router_load_balancing_type": "sinkhorn"}
    for topk, score, pre_softmax in ((1, "sigmoid", False), (2, "softmax", True)):
        model = model_of(SMALL | given | {"max_position_embeddings": 8, "moe_router_topk": topk})
        assert (model.moe_router_score_function, model.moe_router_pre_softmax) == (score, pre_softmax)


def test_layers_with_experts_are_read_as_megatron_counts_them() -> None:
    for given, expected in ((1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])):
        arguments = SMALL | {"num_layers": 4, "num_experts": 4, "add_bias_linear": False, "moe_layer_freq": given}
        model = model_of(arguments | {"max_position_embeddings": 8})
        assert [int(layer.feed_forward == "moe") for layer in model.layers] == expected
