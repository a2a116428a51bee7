"""Hugging Face folders in and out: what transformers computes from one side, megalite computes from the other."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.compatibility import function_of
from megalite.checkpoint.manifest import MASTER, MODEL
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensors import Kind
from megalite.commands.convert import report
from megalite.config import DataConfig, ModelConfig, ParallelConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.conversion import families
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import Family, choose
from megalite.conversion.huggingface import open_huggingface, write_huggingface
from megalite.conversion.huggingface_files import HuggingFaceFiles
from megalite.conversion.mamba_families import BAMBA
from megalite.conversion.mapping import FileTensor, FromFiles, Rule
from megalite.conversion.native import open_megalite, write_megalite
from megalite.conversion.opened import OpenedModel
from megalite.conversion.verification import logits
from megalite.errors import CheckpointError
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box
from megalite.parallel.state import states_of
from megalite.training.data import open_data
from megalite.training.display import Display
from tests.harness import huggingface as theirs
from tests.harness.checkpoints import write as write_checkpoint
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.huggingface import CONFIGS
from tests.harness.tool import Ended, run_tool

pytestmark = pytest.mark.costly

LOGITS = 1e-5
"""Both compute logits of about 1 in fp32, in another order."""
MATTERS = 1e-3
"""Least change of logits by a mistake: a hundred times the rounding."""
TOKENS = theirs.tokens()


def no_progress(_: int) -> None:
    pass


def convert(*flags: object) -> Ended:
    return run_tool("convert", *flags)


def distance(ours: Tensor, others: Tensor) -> float:
    return (ours - others).abs().max().item()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of each of `CONFIGS`, as transformers writes it, and the logits that it has."""
    root = tmp_path_factory.mktemp("families")
    for name in CONFIGS:
        torch.save(theirs.logits(theirs.save(root / name, name), TOKENS), root / f"{name}.pt")
    return root


def write_out(opened: OpenedModel, folder: Path, **options: Any) -> Family:
    settings: dict[str, Any] = {"dtype": None, "shard": 10**9, "workers": 1, "advance": no_progress} | options
    return write_huggingface(opened, folder, **settings)


def all_tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


# ------------------------------------------------------------------------------------------------ the same model


@pytest.mark.parametrize("name", CONFIGS)
def test_megalite_computes_what_transformers_does(folders: Path, name: str) -> None:
    expected = torch.load(folders / f"{name}.pt")
    assert distance(logits(open_huggingface(folders / name), TOKENS), expected) <= LOGITS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (place % 6 > 0)) for place, name in enumerate(CONFIGS)]
)
def test_there_and_back_is_the_same_bit_for_bit(folders: Path, name: str, tmp_path: Path) -> None:
    opened = open_huggingface(folders / name)
    write_megalite(opened, tmp_path / "run", dtype=None, layout=None, workers=2, advance=no_progress)
    family = write_out(open_megalite(tmp_path / "run"), tmp_path / "out", shard=20_000)
    before, after = all_tensors(folders / name), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, values in before.items():
        assert torch.equal(values, after[key]), key
    if name != "mistral-full":  # which is a llama but for its name
        assert family.name == json.loads((folders / name / "config.json").read_text())["model_type"]
    loaded, info = theirs.load(tmp_path / "out")
    assert not any(info.values()), info
    assert distance(theirs.logits(loaded, TOKENS), torch.load(folders / f"{name}.pt")) <= LOGITS


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_read_in_both_of_its_generations(folders: Path, name: str) -> None:
    config = json.loads((folders / name / "config.json").read_text())
    family = next(each for each in FAMILIES if each.name == config["model_type"])
    model = family.model(config)
    legacy = family.config(model)
    assert ("rope_parameters" in legacy) == (name == "olmo-hybrid-without-positions")
    assert ({"rope_theta", "rotary_emb_base"} & legacy.keys() == set()) == name.startswith(WITHOUT_ROTARY)
    assert "rope_parameters" in config or name.startswith(WITHOUT_ROTARY)
    assert family.model(legacy) == replace(model, **{key: getattr(family.model(legacy), key) for key in _DEFAULTED})


WITHOUT_ROTARY = ("gpt2", "nemotron", "granite-dense", "olmo-hybrid-without-positions", "kimi-linear")
_DEFAULTED = ("kv_channels", "ffn_hidden_size")
"""Fields that may be left to their defaults, and are written out."""


def test_the_family_that_a_model_came_from_is_kept(folders: Path, tmp_path: Path) -> None:
    opened = open_huggingface(folders / "mistral-full")
    assert write_out(opened, tmp_path / "out").name == "mistral"
    assert write_out(replace(opened, folder=None), tmp_path / "other").name == "llama"


PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma, whose gelu is its tanh form": (
        "gemma",
        {"hidden_act": "gelu", "hidden_activation": None},
        {"geglu": True, "exact_gelu": False},
    ),
    "Gemma 2, with keys that are not read": (
        "gemma2",
        {"hidden_act": "gelu", "sliding_window_size": 6, "cache_implementation": "hybrid"},
        {"geglu": True, "exact_gelu": False},
    ),
    "GPT-NeoX-20B": (
        "gpt-neox",
        {"hidden_act": "gelu_fast", "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
        {"exact_gelu": False},
    ),
    "DistilGPT-2": ("gpt2", {"_num_labels": 1, "max_length": 50, "do_sample": True}, {"hidden_size": 24}),
    "Llama, the first": ("llama", {"max_sequence_length": 64, "num_key_value_heads": None}, {"kv_groups": 4}),
    "Mistral, whose window is by default": ("mistral", {"sliding_window": "gone"}, {"window_size": "4095,0"}),
    "Mistral, whose groups are by default": (
        "mistral",
        {"num_attention_heads": 16, "num_key_value_heads": "gone"},
        {"kv_groups": 8},
    ),
    "MiniMax-M2, which counts rotated channels": (
        "minimax-m2",
        {"rope_parameters": "gone", "rope_theta": 3.0, "rotary_dim": 4},
        {"rotary_base": 3.0, "rotary_percent": 0.5},
    ),
    "gpt-oss, all but sizes by default": (
        "gpt-oss",
        dict.fromkeys(("rope_parameters", "layer_types", "sliding_window"), "gone")
        | dict.fromkeys(("swiglu_limit", "num_experts_per_tok"), "gone"),
        {"rotary_scaling_factor": 32.0, "rotary_base": 150_000.0, "window_size": "127,0", "moe_router_topk": 4}
        | {"yarn_correction_range_round_to_int": False, "activation_func_clamp_value": 7.0},
    ),
    "scaling beside its own parameters": (
        "llama",
        {"rope_theta": 99.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rotary_seq_len_interpolation_factor": 2.0, "rotary_base": 99.0},
    ),
}


@pytest.mark.parametrize("what", PUBLISHED)
def test_what_published_files_say_is_read_as_transformers_reads_it(folders: Path, what: str) -> None:
    name, changes, said = PUBLISHED[what]
    config = json.loads((folders / name / "config.json").read_text()) | changes
    family = next(each for each in FAMILIES if each.name == config["model_type"])
    model = family.model({key: value for key, value in config.items() if value != "gone"})
    assert {field: getattr(model, field) for field in said} == said


# ------------------------------------------------------------------------------------------------ experts

WITH_EXPERTS = ["mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "olmoe", "minimax-m2"]
WITH_EXPERTS += ["deepseek-v2", "deepseek-v3", "deepseek-v32", "glm-moe-dsa", "kimi-linear"]


@pytest.mark.wide
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_that_are_one_tensor_are_read(folders: Path, name: str, tmp_path: Path) -> None:
    theirs.save(tmp_path / "fused", name, save_original_format=False)
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in all_tensors(tmp_path / "fused"))
    expected = torch.load(folders / f"{name}.pt")
    assert distance(logits(open_huggingface(tmp_path / "fused"), TOKENS), expected) <= LOGITS


def test_a_folder_with_one_convolution_and_other_names_of_norms_is_read(folders: Path, tmp_path: Path) -> None:
    theirs.save(tmp_path / "other", "olmo-hybrid", save_original_format=False)
    assert any(tensor.endswith("linear_attn.conv1d.weight") for tensor in all_tensors(tmp_path / "other"))
    expected = torch.load(folders / "olmo-hybrid.pt")
    assert distance(logits(open_huggingface(tmp_path / "other"), TOKENS), expected) <= LOGITS


FLAGS = """--mock-data --tokenizer-type NullTokenizer --vocab-size 66 --num-layers 4 --hidden-size 24
    --ffn-hidden-size 40 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 8
    --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --window-size 4,0 --hidden-dropout 0 --attention-dropout 0 --seq-length 16
    --micro-batch-size 1 --lr 1e-3 --train-iters 1 --eval-iters 0 --num-experts 4 --rotary-base 1000000
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"""


@pytest.mark.wide
def test_loads_that_a_loss_remembers_begin_anew_and_stay_behind(folders: Path, tmp_path: Path) -> None:
    config = resolve(parse_arguments([*FLAGS.split(), "--save", str(tmp_path / "run")]).config, 1)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh(), tmp_path / "run")
    trainer.load_model(open_huggingface(folders / "mixtral"))
    states = list(states_of(trainer.network))
    assert len(states) == 4
    for state in states:
        assert state.values.tolist() == [0.25] * 4
    with trainer.loader, Display(1, 1, enabled=False) as display:
        trainer.step()
        trainer.save(display, last=True)
    assert write_out(open_megalite(tmp_path / "run"), tmp_path / "out").name == "mixtral"


@pytest.mark.wide
@pytest.mark.parametrize("form", ["per expert", "fused"])
def test_layers_that_predict_further_tokens_are_left_out_with_a_note(folders: Path, tmp_path: Path, form: str) -> None:
    source = folders / "glm4-moe"
    if form == "fused":
        theirs.save(tmp_path / "fused", "glm4-moe", save_original_format=False)
        source = tmp_path / "fused"
    further = {
        f"model.layers.{layer}.{name}": torch.zeros(24)
        for layer in (4, 5)
        for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight", "shared_head.norm.weight")
    }
    folder = rewrite(source, tmp_path / "with", all_tensors(source) | further)
    (note,) = open_huggingface(folder).notes  # although the folder's config.json has no such layers
    assert "has 6 tensors of layers that predict further tokens (MTP), such as model.layers.4.eh_proj" in note
    folder = edit(folder, tmp_path / "described", num_nextn_predict_layers=2)
    ended = convert("--loader", "hf", "--saver", "megalite", "--load-dir", folder, "--save-dir", tmp_path / "run")
    assert ended.code == 0
    assert re.search(r"note: .* has 6 tensors of layers .*\(MTP\), such as model\.layers\.4\.eh_proj", ended.stderr)
    assert distance(logits(open_megalite(tmp_path / "run"), TOKENS), torch.load(folders / "glm4-moe.pt")) <= LOGITS
    write_out(open_megalite(tmp_path / "run"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.wide
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_the_bias_of_the_choice_stays_precise(folders: Path, tmp_path: Path, saved: torch.dtype) -> None:
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors = {key: values.bfloat16() for key, values in all_tensors(folders / "glm4-moe").items()}
    tensors[name] = all_tensors(folders / "glm4-moe")[name].to(saved)
    opened = open_huggingface(rewrite(folders / "glm4-moe", tmp_path / "source", tensors))
    assert opened.dtype == torch.bfloat16
    write_megalite(opened, tmp_path / "run", dtype=None, layout=ParallelConfig(), workers=1, advance=no_progress)
    native = open_megalite(tmp_path / "run")
    assert native.source.tensors["state/layers.2.moe.expert_bias"].dtype == torch.float32
    assert native.source.tensors["layers.2.moe.router"].dtype == torch.bfloat16
    write_out(native, tmp_path / "out", dtype=torch.float16)
    written = all_tensors(tmp_path / "out")
    assert torch.equal(written[name], tensors[name].float())
    assert written["model.norm.weight"].dtype == torch.float16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"


def without(folder: Path, into: Path, lost: str, more: dict[str, Tensor] | None = None) -> Path:
    """A copy of a folder without one tensor, and with more."""
    tensors = all_tensors(folder)
    del tensors[lost]
    into.mkdir()
    save_file(tensors | (more or {}), into / "model.safetensors")
    shutil.copy(folder / "config.json", into)
    return into


def test_an_expert_that_is_missing_or_there_twice_or_of_another_width_is_refused(folders: Path, tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{lost} is missing, but the model has"):
        open_huggingface(without(folders / "qwen3-moe", tmp_path / "missing", lost))
    wider = {lost: torch.zeros(17, 24)}
    with pytest.raises(CheckpointError, match=rf"{lost} has shape \[17, 24\], but the model has \[16, 24\]"):
        open_huggingface(without(folders / "qwen3-moe", tmp_path / "wider", lost, wider))
    fused = {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(6, 32, 24)}
    with pytest.raises(CheckpointError, match=r"tensors of two forms of its family, such as .*gate_up_proj"):
        open_huggingface(without(folders / "qwen3-moe", tmp_path / "both", lost, fused))
    one_more = {lost.replace(".3.", ".6."): torch.zeros(16, 24)}
    with pytest.raises(CheckpointError, match=r"has weights that qwen3_moe does not have: .*experts\.6"):
        open_huggingface(without(folders / "qwen3-moe", tmp_path / "more", lost, one_more))


REFUSED_EXPERTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but only 0.0 is supported"),
    "two numbers of experts": ("qwen3-moe", {"num_experts": 6, "num_local_experts": 7}, "num_experts and .* differ"),
    "no number of experts": ("mixtral", {"num_local_experts": "gone"}, "num_local_experts is missing"),
    "one expert, whose weight is 1": ("minimax-m2", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
    "clipped queries": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, but only None is supported"),
    "no layer with experts": ("qwen3-moe", {"decoder_sparse_step": 9}, "no layer has experts"),
    "no step": ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0 or"),
    "more choices than experts": ("mixtral", {"num_experts_per_tok": 9}, "--moe-router-topk 9 is more than"),
    "weights of one expert that add up to 1": ("glm4-moe-one", {"norm_topk_prob": True}, "but only False is supported"),
    "weights that do not add up to 1": ("glm4-moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    "no layer with experts after the dense ones": ("glm4-moe", {"first_k_dense_replace": 4}, "is 4 for 4 layers"),
    "no shared experts": ("glm4-moe", {"n_shared_experts": 0}, "n_shared_experts is 0"),
    "more groups than there are": ("glm4-moe", {"n_group": 1, "topk_group": 2}, "topk_group is 2 of 1 group"),
    "groups that do not divide": ("glm4-moe", {"n_group": 3}, "--moe-router-num-groups 3"),
    "no number of prediction layers": ("glm4-moe", {"num_nextn_predict_layers": -1}, "is no number of layers"),
    "windows of Qwen 3": ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window is"),
}


@pytest.mark.parametrize("what", REFUSED_EXPERTS)
def test_configs_of_other_experts_are_refused(folders: Path, what: str) -> None:
    name, changes, words = REFUSED_EXPERTS[what]
    config = json.loads((folders / name / "config.json").read_text()) | changes
    family = next(each for each in FAMILIES if each.name == config["model_type"])
    with pytest.raises(CheckpointError, match=words):
        family.model({key: value for key, value in config.items() if value != "gone"})


# ------------------------------------------------------------------------------------------------ power of these tests


def _changed(values: Tensor) -> Tensor:
    """Other values of the same kind, in another order in each dimension."""
    for dimension in range(values.dim()):
        values = values.roll(1, dimension)
    return values


class Planted(HuggingFaceFiles):
    """Files in which the tensor of one rule is not what it should be, in one layer."""

    planted = ""

    def tensor(self, name: str) -> Tensor:
        values = super().tensor(name)
        return _changed(values) if name == self.planted else values


PLACES = dict.fromkeys(("qwen2-moe", "glm4-moe"), "2") | {"nemotron-h": "[0-3]", "bamba": "[01]"}
PLACES |= dict.fromkeys(("qwen3-next", "qwen3.5"), "[01]") | {"lfm2-biases": "[12]", "kimi-linear": "[0-2]"}
PLACES |= {"deepseek-v2": "[01]", "deepseek-v3": "[02]"}
"""Layers of a model whose tensors are changed, if another than the second one shows more."""


@pytest.mark.wide_except("gemma2")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.wide] * (name not in ("gpt2", "gemma2")))
        for name in (
            *(
                "llama-linear",
                "qwen3",
                "gpt2",
                "gpt-neox",
                "gemma2",
                "mixtral",
                "qwen2-moe",
                "glm4-moe",
                "gpt-oss",
                "minimax-m2",
            ),
            *("nemotron-h", "bamba", "qwen3-next", "qwen3.5", "lfm2-biases"),
            *("deepseek-v2", "deepseek-v3", "moonlight", "kimi-linear"),
        )
    ],
)
def test_each_tensor_of_each_family_shows(folders: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.load(folders / f"{name}.pt")
    others = re.compile(rf"(layers|h)\.(?!({PLACES.get(name, '1')})\.)\d")
    tensors = [tensor for tensor in all_tensors(folders / name) if not others.search(tensor)]
    assert len(tensors) > 10
    monkeypatch.setattr("megalite.conversion.huggingface.HuggingFaceFiles", Planted)
    for tensor in tensors:
        monkeypatch.setattr(Planted, "planted", tensor)
        assert distance(logits(open_huggingface(folders / name), TOKENS), expected) > MATTERS, tensor


CONFUSED = {
    "gate and up": ("llama", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "keys and values": ("qwen3", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "the norms of queries and keys": ("qwen3", "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    "the norms of a layer": ("llama", "input_layernorm.weight", "post_attention_layernorm.weight"),
    "a norm before and behind": (
        "gemma2",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
    ),
    "norms of GPT-2": ("gpt2", "ln_1.weight", "ln_2.weight"),
    "biases of GPT-2": ("gpt2", "attn.c_proj.bias", "mlp.c_proj.bias"),
}


@pytest.mark.parametrize("confused", CONFUSED)
def test_rules_that_are_confused_show(folders: Path, confused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *pair = CONFUSED[confused]

    def swapped(rule: Rule) -> Rule:
        for one, other in (pair, reversed(pair)):
            if rule.file.endswith("." + one):
                return replace(rule, file=rule.file.removesuffix(one) + other)
        return rule

    config = theirs.make_config(name)
    family = next(each for each in FAMILIES if each.name == config.model_type)
    broken = replace(family, rules=tuple(map(swapped, family.rules)))
    assert broken != family
    monkeypatch.setattr("megalite.conversion.huggingface.FAMILIES", (broken,))
    expected = torch.load(folders / f"{name}.pt")
    assert distance(logits(open_huggingface(folders / name), TOKENS), expected) > MATTERS


PATTERNS = {
    "heads and their width": ("llama", "(heads width) hidden -> heads", "(width heads) hidden -> heads"),
    "groups and their width": ("llama", "(groups width) hidden -> groups", "(width groups) hidden -> groups"),
    "the output's heads": ("qwen3", "hidden (heads width) -> hidden", "hidden (width heads) -> hidden"),
    "what stands together in GPT-2": ("gpt2", "(three heads width)", "(heads three width)"),
    "gate and up of gpt-oss": ("gpt-oss", "(expert_ffn two)", "(two expert_ffn)"),
    "what stands together in GPT-NeoX": ("gpt-neox", "(heads three width)", "(three heads width)"),
}


@pytest.mark.parametrize("broken", PATTERNS)
def test_axes_that_are_confused_show(folders: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, old, new = PATTERNS[broken]
    config = theirs.make_config(name)
    family = next(each for each in FAMILIES if each.name == config.model_type)
    rules = tuple(replace(rule, pattern=rule.pattern.replace(old, new)) for rule in family.rules)
    assert rules != family.rules
    monkeypatch.setattr("megalite.conversion.huggingface.FAMILIES", (replace(family, rules=rules),))
    expected = torch.load(folders / f"{name}.pt")
    assert distance(logits(open_huggingface(folders / name), TOKENS), expected) > MATTERS


SAID: dict[str, dict[str, Any]] = {
    "llama": {"rotary_base": 600.0, "norm_epsilon": 1e-2},
    "llama-scaled": {
        "rope_scaling_factor": 5.0,
        "rope_scaling_low_freq_factor": 2.0,
        "rope_scaling_high_freq_factor": 5.0,
        "rope_scaling_original_max_position_embeddings": 32,
        "use_rope_scaling": False,
    },
    "llama-linear": {"rotary_seq_len_interpolation_factor": 2.0},
    "llama-yarn": {"rotary_scaling_factor": 5.0, "yarn_beta_slow": 3.0, "yarn_attention_factor": 1.0},
    "mistral": {"window_size": "5,0"},
    "qwen2-window": {"window_attn_skip_freq": "[0,0,1,1]"},
    "qwen3": {"yarn_beta_fast": 32.0, "yarn_correction_range_round_to_int": True},
    "gpt2-exact": {"exact_gelu": False},
    "gpt-neox": {"rotary_percent": 0.5, "use_parallel_residual": False},
    "gemma2": {"query_pre_attn_scalar": 8.0, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "mixtral": {"moe_router_pre_softmax": True, "moe_router_topk": 3},
    "qwen2-moe": {"moe_router_pre_softmax": False},
    "olmoe": {"moe_router_pre_softmax": False},
    "minimax-m2": {"rotary_percent": 1.0, "moe_router_topk": 3},
    "granite": {"embedding_multiplier": 9.0, "residual_multiplier": 0.3, "query_pre_attn_scalar": 8.0},
    "granite-dense": {"logits_scaling": 4.0, "position_embedding_type": "rope"},
    "nemotron-h": {"mamba_dt_min": 0.3, "moe_router_topk_scaling_factor": 1.0},
    "bamba": {"mamba_dt_max": None, "rotary_percent": 1.0},
    "qwen3-next": {"norm_epsilon": 1e-2, "rotary_percent": 0.25},
    "deepseek-v2": {
        "latent_norm_epsilon": 1e-3,
        "moe_router_group_scores": 2,
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "deepseek-v3": {"moe_router_group_scores": 1, "moe_router_num_groups": None, "rotary_scaling_factor": 4.0},
    "moonlight": {"latent_norm_epsilon": None, "rotary_base": 1e4},
    "kimi-linear": {"position_embedding_type": "rope", "latent_norm_epsilon": None},
    "gpt-oss": {
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 0.0,
        "window_size": "6,0",
        "no_rope_freq": "2",
    },
    "gemma3": {"window_rotary_base": None, "rotary_seq_len_interpolation_factor": None, "scale_embeddings": False},
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, said in SAID.items() for field in said])
def test_each_thing_that_a_config_says_shows(folders: Path, name: str, field: str) -> None:
    opened = open_huggingface(folders / name)
    assert getattr(opened.config, field) != SAID[name][field]
    other = replace(opened, config=replace(opened.config, **{field: SAID[name][field]}))
    # The exact GELU is close to its tanh form, and some frequencies are hardly scaled.
    assert distance(logits(other, TOKENS), torch.load(folders / f"{name}.pt")) > 5 * LOGITS


# ------------------------------------------------------------------------------------------------ what is refused


def edit(folder: Path, into: Path, **changes: Any) -> Path:
    """A copy of a folder with other keys in its config.json."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).hardlink_to(file)
    (into / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | changes
    (into / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))
    return into


OTHERWISE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "windows from a layer on": ("qwen2-window", {"layer_types": "gone"}, {}),
    "caps that are off": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "caps that are left out": (
        "gemma2",
        {"attn_logit_softcapping": "gone", "final_logit_softcapping": "gone"},
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "the norms' epsilon, left out": ("llama", {"rms_norm_eps": "gone"}, {"norm_epsilon": 1e-6}),
}
"""Keys that say the same as others, or nothing: transformers' defaults hold then."""


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_is_said_otherwise_or_not_at_all(folders: Path, tmp_path: Path, what: str) -> None:
    name, changes, said = OTHERWISE[what]
    found = open_huggingface(edit(folders / name, tmp_path / "folder", **changes)).config
    assert function_of(found) == function_of(replace(open_huggingface(folders / name).config, **said))


def test_what_is_made_of_several_tensors_has_the_widest_dtype() -> None:
    halves = [FileTensor(name, (2,), (("both", Box((2 * n,), (2,)), lambda x: x),)) for n, name in enumerate("ab")]
    for dtypes in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        tensors = {name: Kind((2,), dtype) for name, dtype in zip("ab", dtypes, strict=True)}
        source = FromFiles(SimpleNamespace(tensors=tensors), halves, {"both": (4,)})
        assert source.tensors["both"].dtype == torch.float32


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an architecture": ("llama", {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba', MambaFor"),
    "a head of another kind": ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequence"),
    "a way to scale positions": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "scaled by 'dynamic', supported are default, linear, llama3, yarn",
    ),
    "a key of the scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2]}},
        "mrope_section of rotary embeddings scaled by 'default' is unknown",
    ),
    "a key": ("llama", {"attention_sinks": 4}, "attention_sinks is unknown: 4"),
    "an activation": ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu', supported"),
    "half of the biases": ("llama", {"mlp_bias": True}, "attention_bias is False and mlp_bias True"),
    "a missing size": ("llama", {"hidden_size": "gone"}, "it has no hidden_size"),
    "a kind of layer": ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention"),
    "scores by the layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "but only False is supported"),
    "a size that is none": ("llama", {"hidden_size": "64"}, "hidden_size is '64', it must be a whole number above 0"),
    "no heads": ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0, it must"),
    "an infinite base": (
        "llama",
        {"rope_parameters": {"rope_theta": 1e999}},
        "rotary_base is inf, it must be a number",
    ),
    "nonsense": ("llama", {"rope_parameters": [1]}, "rope_parameters [1] cannot be read"),
    "kinds of other layers": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
    "a window without keys": ("mistral", {"sliding_window": 0}, "--window-size '-1,0'"),
    "heads in groups": ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of"),
    "half a pair": ("gpt-neox", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "3 channels of each head"),
    "a size beyond all files": ("llama", {"hidden_size": 2**16, "num_attention_heads": 2**8}, "too few for the model"),
    "a size beyond all machines": ("llama", {"hidden_size": 10**13, "num_attention_heads": 10**3}, "more than 8,192 r"),
    "layers without end": ("llama", {"num_hidden_layers": 10**9}, "--num-layers 1000000000: must be at most 10,000"),
    "layers without end, some with windows": ("gemma2", {"num_hidden_layers": 10**9}, "at most 10,000 are"),
    "layers beyond all files": ("llama", {"num_hidden_layers": 9_999}, "too few for the model that it describes, of 9"),
    "a negative epsilon": ("llama", {"rms_norm_eps": -1.0}, "--norm-epsilon -1.0: must be at least 0"),
    "a base of 0": ("llama", {"rope_parameters": {"rope_theta": 0}}, "--rotary-base 0.0: must be above 0"),
    "a scaling by 0": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}},
        "--rotary-seq-len-interpolation-factor 0.0: must be above 0",
    ),
    "positions without end": ("llama", {"max_position_embeddings": 2**62}, "must be at most 2^53"),
    "a name without end": ("llama", {"hidden_act": "x" * 10**6}, "hidden_act is 'xxx"),
    "scaling by its old name": (
        "gemma3",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling has a type, but no rope_type",
    ),
    "scaling that is not rounded": (
        "gemma3",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
        "truncate is false",
    ),
    "a part of a head": ("llama", {"partial_rotary_factor": 0.5}, "this family rotates all of a head"),
    "a gate of another function": (
        "gemma",
        {"hidden_act": "silu"},
        "hidden_act is 'silu', supported are gelu, gelu_pytorch",
    ),
    "a cap that is none": ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0"),
    "two ways": ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_megalite_does_not_compute_is_refused(folders: Path, tmp_path: Path, what: str) -> None:
    name, changes, message = REFUSED[what]
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        open_huggingface(edit(folders / name, tmp_path / "edited", **changes))
    assert "config.json" in str(raised.value) or "has files of" in str(raised.value)
    assert len(str(raised.value)) < 1500


def rewrite(folder: Path, into: Path, tensors: dict[str, Tensor]) -> Path:
    edit(folder, into)
    (into / "model.safetensors").unlink()
    save_file(tensors, into / "model.safetensors")
    return into


def test_files_must_have_each_tensor_and_no_other(folders: Path, tmp_path: Path) -> None:
    tensors = all_tensors(folders / "llama")
    without = {name: values for name, values in tensors.items() if name != "model.layers.2.mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        open_huggingface(rewrite(folders / "llama", tmp_path / "missing", without))
    more = tensors | {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"weights that llama does not have: model\.layers\.0\.self_attn\.sinks"):
        open_huggingface(rewrite(folders / "llama", tmp_path / "more", more))
    padded = tensors | {"lm_head.weight": torch.zeros(128, 24)}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[128, 24\], but the model has \[67, 24\]"):
        open_huggingface(rewrite(folders / "llama", tmp_path / "padded", padded))


def test_two_heads_of_a_tied_model_are_refused(folders: Path, tmp_path: Path) -> None:
    tensors = all_tensors(folders / "llama-scaled")
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert open_huggingface(rewrite(folders / "llama-scaled", tmp_path / "same", same))
    same["lm_head.weight"][3, 3] += 1.0
    with pytest.raises(CheckpointError, match=r"set tie_word_embeddings to false"):
        open_huggingface(rewrite(folders / "llama-scaled", tmp_path / "other", same))


def test_damaged_files_are_refused(folders: Path, tmp_path: Path) -> None:
    whole = (folders / "llama" / "model.safetensors").read_bytes()
    for number, damaged in enumerate((b"", whole[:4], whole[:-8], b"\xff" * 16 + whole, b"version https://git-lfs")):
        folder = edit(folders / "llama", tmp_path / f"damaged{number}")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors|is missing"):
            open_huggingface(folder)


@pytest.mark.parametrize("weight_map", [["a"], None, {}, {"a": 1, "b": "c"}, {"a": ["b"]}])
def test_an_index_that_is_none_is_refused(folders: Path, tmp_path: Path, weight_map: Any) -> None:
    folder = edit(folders / "llama", tmp_path / "edited")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json is not an index of files in its folder"):
        open_huggingface(folder)


def test_one_file_goes_before_an_index(folders: Path, tmp_path: Path) -> None:
    folder = edit(folders / "llama", tmp_path / "edited")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "stale.safetensors"}}))
    assert distance(logits(open_huggingface(folder), TOKENS), torch.load(folders / "llama.pt")) <= LOGITS


def test_weights_are_of_real_numbers(folders: Path, tmp_path: Path) -> None:
    tensors = all_tensors(folders / "llama")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight with the dtype int8, supported are F64, F32"):
        open_huggingface(rewrite(folders / "llama", tmp_path / "edited", tensors))


def test_nesting_without_end_is_refused(folders: Path, tmp_path: Path) -> None:
    folder = edit(folders / "llama", tmp_path / "edited")
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: nested deeper"):
        open_huggingface(folder)


def test_an_index_stays_in_its_folder(folders: Path, tmp_path: Path) -> None:
    folder = edit(folders / "llama", tmp_path / "hostile")
    index = {"weight_map": {"lm_head.weight": "../llama/model.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not an index of files in its folder"):
        open_huggingface(folder)


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


@pytest.mark.parametrize("archive", [True, False])
def test_pickled_weights_are_read_as_tensors_alone(folders: Path, tmp_path: Path, capsys: Any, archive: bool) -> None:
    folder = edit(folders / "gpt2", tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save(all_tensors(folders / "gpt2"), folder / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
    expected = torch.load(folders / "gpt2.pt")
    assert distance(logits(open_huggingface(folder), TOKENS), expected) <= LOGITS
    torch.save({"transformer.wte.weight": Hostile()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is missing, but the model has"):
        open_huggingface(folder)
    assert "unpickled" not in capsys.readouterr().out


OTHER_NAMES = {
    "gpt2 without a prefix": ("gpt2", {"transformer.": ""}, {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}),
    "gpt-neox with another head": ("gpt-neox", {"embed_out.": "lm_head."}, {}),
    "gpt-neox with masks": ("gpt-neox", {}, {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8).bool()}),
    "llama with old buffers": ("llama", {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
}


@pytest.mark.parametrize("what", OTHER_NAMES)
def test_names_of_other_versions_are_read(folders: Path, tmp_path: Path, what: str) -> None:
    name, renamed, more = OTHER_NAMES[what]
    tensors = all_tensors(folders / name)
    for old, new in renamed.items():
        tensors = {re.sub(f"^{re.escape(old)}", new, key): values for key, values in tensors.items()}
    opened = open_huggingface(rewrite(folders / name, tmp_path / "renamed", tensors | more))
    assert distance(logits(opened, TOKENS), torch.load(folders / f"{name}.pt")) <= LOGITS


# ------------------------------------------------------------------------------------------------ what is written


def test_networks_that_no_family_has_are_refused_by_their_flags() -> None:
    model = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=11, max_position_embeddings=8)
    assert choose(FAMILIES, model)[0] is families.GPT2
    with pytest.raises(CheckpointError, match=r"the nearest is gpt2, except --squared-relu|--use-parallel-residual"):
        choose(FAMILIES, replace(model, use_parallel_residual=True))
    llama = families.LLAMA.model(theirs.as_written(theirs.make_config("llama")))
    with pytest.raises(CheckpointError, match=r"the nearest is llama, except --norm|--mlp|--sandwich-norm True"):
        choose(FAMILIES, replace(llama, sandwich_norm=True))
    with pytest.raises(CheckpointError, match=r"--rotary-percent 0\.25"):
        choose(FAMILIES, replace(llama, rotary_percent=0.25))
    assert choose(FAMILIES, replace(llama, rotary_percent=0.5))[0] is BAMBA  # without a Mamba-2 layer
    with pytest.raises(CheckpointError, match=r"the nearest is llama, except --rotary-interleaved True"):
        choose(FAMILIES, replace(llama, rotary_interleaved=True))
    gemma = families.GEMMA.model(theirs.as_written(theirs.make_config("gemma")))
    with pytest.raises(CheckpointError, match=r"the nearest is gemma, except --exact-gelu True"):
        choose(FAMILIES, replace(gemma, exact_gelu=True))
    yarn = replace(llama, position_embedding_type="yarn", yarn_original_max_position_embeddings=16)
    assert families.LLAMA.config(yarn)["rope_scaling"]["factor"] == 1.0
    yarn = replace(llama, position_embedding_type="yarn", rotary_scaling_factor=2.0, mscale=0.7)
    with pytest.raises(CheckpointError, match="--mscale"):
        choose(FAMILIES, replace(yarn, yarn_original_max_position_embeddings=16))


def test_what_is_cast_is_cast_once_and_asked_for(folders: Path, tmp_path: Path) -> None:
    opened = open_huggingface(folders / "qwen3")
    write_out(opened, tmp_path / "out", dtype=torch.bfloat16)
    for name, values in all_tensors(folders / "qwen3").items():
        assert torch.equal(all_tensors(tmp_path / "out")[name], values.bfloat16()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(("dtype", "from_masters"), [(torch.float32, True), (torch.bfloat16, False), (None, False)])
def test_weights_wanted_finer_than_they_are_saved_come_from_their_masters(
    dtype: torch.dtype | None, from_masters: bool, tmp_path: Path
) -> None:
    masters = {"a": torch.full((3,), 1.001), "b": torch.full((2, 2), -0.3001)}
    saved = {MODEL + name: values.bfloat16() for name, values in masters.items()}
    config = {
        "model": asdict(ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, max_position_embeddings=8)),
        "data": asdict(DataConfig(seq_length=8)),
    }
    write_checkpoint(tmp_path, saved | {MASTER + name: values for name, values in masters.items()}, config=config)
    source = open_megalite(tmp_path, dtype).source
    assert source.tensors.keys() == masters.keys()
    for name, values in masters.items():
        found = torch.empty(values.shape)
        source.fill(name, Box.whole(tuple(values.shape)), found)
        assert torch.equal(found, values if from_masters else values.bfloat16().float())


def test_weights_that_are_no_numbers_are_told(folders: Path, tmp_path: Path) -> None:
    tensors = all_tensors(folders / "llama")
    tensors["model.norm.weight"][3] = math.inf
    tensors["model.layers.1.mlp.down_proj.weight"].fill_(math.nan)
    rewrite(folders / "llama", tmp_path / "broken", tensors)
    told = "WARNING: 2 of 31 tensors have NaN or infinities: final_norm.weight, layers.1.mlp.down\n"
    for source, expected in ((folders / "llama", ""), (tmp_path / "broken", told)):
        flags = (
            "--loader",
            "hf",
            "--saver",
            "megalite",
            "--load-dir",
            source,
            "--save-dir",
            tmp_path / f"of {source.name}",
        )
        ended = convert(*flags)
        assert (ended.code, ended.stderr) == (0, expected)


def test_the_folder_has_what_others_look_for(folders: Path, tmp_path: Path) -> None:
    source = edit(folders / "llama", tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_files").mkdir()
    (source / "tokenizer_config.json").write_text('{"eos_token": "e"}')
    (source / "chat_template.jinja").write_text("hello")
    flags = ("--load-dir", source, "--loader", "hf", "--saver", "megalite", "--save-dir", tmp_path / "run")
    assert convert(*flags).code == 0
    flags = ("--load-dir", tmp_path / "run", "--loader", "megalite", "--saver", "hf", "--save-dir", tmp_path / "out")
    assert convert(*flags, "--max-shard-size", 2e-5).code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    assert names - {*shards} == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert shards == [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    assert len(shards) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = all_tensors(tmp_path / "out")
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in tensors.values())
    for file in shards:
        assert {name for name, place in index["weight_map"].items() if place == file} == set(
            load_file(tmp_path / "out" / file)
        )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, 5)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not {"rope_parameters", "dtype"} & set(config)


def test_a_folder_is_never_half_there(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megalite.checkpoint.file_writer._sync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_out(open_huggingface(folders / "gpt2"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match="already exists"):
        write_out(open_huggingface(folders / "gpt2"), tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_the_folder_one_stands_in_is_written(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    write_out(open_huggingface(folders / "gpt2"), Path())
    assert open_huggingface(tmp_path / "out").config.num_layers == 4


def test_verify_tells_what_agrees_and_what_does_not(folders: Path, tmp_path: Path) -> None:
    flags = ("--loader", "hf", "--saver", "megalite", "--load-dir", folders / "gemma3", "--save-dir", tmp_path / "run")
    ended = convert(*flags, "--verify", "--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2)
    assert ended.code == 0, ended.stderr
    assert "46 of 46 tensors are the same bit for bit" in ended.stdout
    found = re.search(r"those of transformers differ from megalite's by (\S+) at most", ended.stdout)
    assert found is not None
    assert float(found[1]) <= LOGITS
    assert len(CheckpointReader(tmp_path / "run" / "iter_0000000").manifest.files) == 4


def test_verify_finds_a_wrong_conversion(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = FromFiles.fill

    def wrong(self: FromFiles, name: str, box: Box, values: Tensor) -> None:
        fill(self, name, box, values)
        if name == "layers.1.mlp.down" and writing:
            values.neg_()

    monkeypatch.setattr(FromFiles, "fill", wrong)
    writing = [True]

    def honest(*sides: OpenedModel) -> None:
        writing.clear()
        report(*sides)

    monkeypatch.setattr("megalite.commands.convert.report", honest)
    flags = ("--loader", "hf", "--saver", "megalite", "--load-dir", folders / "llama", "--save-dir", tmp_path / "run")
    ended = convert(*flags, "--verify")
    assert ended.code == 93
    assert "they differ in layers.1.mlp.down" in ended.stderr


def test_others_are_asked_for_a_folder_and_one_with_too_much_is_refused(folders: Path, tmp_path: Path) -> None:
    """llama.cpp by a converter that copies the folder's configuration."""
    shutil.copytree(folders / "llama", tmp_path / "theirs")
    (tmp_path / "convert_hf_to_gguf.py").write_text(
        "import shutil, sys; shutil.copy(sys.argv[1] + '/config.json', sys.argv[3])"
    )
    check = partial(run_tool, "check_export", "--folder", tmp_path / "theirs")
    found = check("--llama-cpp", tmp_path)
    assert found.code == 0, found.stderr
    assert "transformers: loads all of it, and continues with [" in found.stdout
    assert f"converted, {(tmp_path / 'theirs/config.json').stat().st_size:,} bytes; its program is not" in found.stdout
    save_file(all_tensors(tmp_path / "theirs") | {"more": torch.zeros(1)}, tmp_path / "theirs/model.safetensors")
    refused = check()
    assert refused.code == 93
    assert "transformers does not take all of" in refused.stderr
    assert "'more'" in refused.stderr


def test_flags_that_do_not_go_together(folders: Path, tmp_path: Path) -> None:
    place = ("--load-dir", folders / "llama", "--save-dir", tmp_path / "out")
    for flags, message in (
        (("--loader", "hf", "--saver", "hf"), "equals --saver"),
        (("--loader", "megalite", "--saver", "hf", "--target-tensor-parallel-size", 2), "needs --saver megalite"),
        (("--loader", "hf", "--saver", "megalite", "--max-shard-size", 2.5), "needs --saver hf"),
        (("--loader", "megalite", "--saver", "hf", "--max-shard-size", 0), "--max-shard-size 0.0: must be above 0"),
        (("--loader", "hf", "--saver", "megalite", "--true-vocab-size", 9), "needs --loader megatron"),
        (("--loader", "hf", "--saver", "megalite", "--target-tensor-parallel-size", 3), "does not divide"),
        (("--loader", "hf", "--saver", "megalite", "--tokenizer-model", tmp_path), "neither tokenizer.json nor"),
        (("--loader", "megalite", "--saver", "hf"), "has no checkpoint"),
        (("--loader", "hf", "--saver", "megalite", "--lode-dir", "x"), "did you mean --load-dir?"),
    ):
        ended = convert(*place, *flags)
        assert ended.code in (64, 93), flags
        assert message in ended.stderr, ended.stderr
        assert not (tmp_path / "out").exists()
