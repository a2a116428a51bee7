"""Folders of PEFT in and out: what PEFT computes with adapters from one side, megalite computes from the other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megalite.checkpoint import load_weights
from megalite.config.adapters import AdaptersConfig
from megalite.conversion.adapters import Adapters, InMemory
from megalite.conversion.huggingface import open_huggingface
from megalite.conversion.native import open_folder
from megalite.conversion.opened import OpenedModel, tensors_of_training
from megalite.conversion.peft import CONFIG, WEIGHTS, write_peft
from megalite.conversion.verification import logits
from megalite.errors import CheckpointError
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, LOGITS
from megalite.parallel.adapter import add_adapters
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.randomness import RandomKey
from tests.harness import huggingface as theirs
from tests.harness.wide import wide_except

pytestmark = pytest.mark.costly

TOKENS = theirs.tokens()
CLOSE, MATTERS = 1e-5, 1e-3
PLAIN: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dora": ("llama", {**PLAIN, "use_dora": True}),
    "llama, some, ranks": (
        "llama",
        {**PLAIN, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2}},
    ),
    "qwen2, rslora": ("qwen2", {**PLAIN, "use_rslora": True}),
    "gpt2, fused": ("gpt2", {**PLAIN, "fan_in_fan_out": True}),
    "gpt2, fused, dora": ("gpt2", {**PLAIN, "fan_in_fan_out": True, "use_dora": True}),
    "gpt-neox, fused, rslora": ("gpt-neox", {**PLAIN, "use_rslora": True}),
    "gemma2": ("gemma2", PLAIN),
    "mixtral, attention": ("mixtral", {**PLAIN, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    "deepseek-v3, latents": ("deepseek-v3", {**PLAIN, "target_modules": ["q_b_proj", "kv_b_proj", "o_proj"]}),
    "granite": ("granite-dense", PLAIN),
    "llama, tables": ("llama", {**PLAIN, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "llama, tables, dora": ("llama", {**PLAIN, "target_modules": ["lm_head", "embed_tokens"], "use_dora": True}),
    "gpt-neox, tables, rslora": (
        "gpt-neox",
        {**PLAIN, "target_modules": ["embed_in", "embed_out"], "use_rslora": True},
    ),
    "mixtral, experts": ("mixtral", {**PLAIN, "target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "mixtral, downs of experts": ("mixtral", {**PLAIN, "target_modules": [], "target_parameters": EXPERTS[1:]}),
    "qwen3-moe, a layer": (
        "qwen3-moe",
        {**PLAIN, "target_modules": [], "target_parameters": ["layers.1.mlp.experts.gate_up_proj"]},
    ),
    "deepseek-v3, experts": ("deepseek-v3", {**PLAIN, "target_modules": ["o_proj"], "target_parameters": EXPERTS}),
    "gpt-oss, experts": (
        "gpt-oss",
        {"r": 3, "lora_alpha": 1, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
}
OFTEN = [
    "llama, tables",
    "mixtral, experts",
    "llama, dora",
    "llama, some, ranks",
    "gpt2, fused",
    "deepseek-v3, latents",
]


def saved_by_peft(folder: Path, name: str, options: dict[str, Any]) -> Tensor:
    """Save a base and adapters with large values, and return the logits of both together."""
    base = theirs.save(folder / "base", name)
    model = peft.get_peft_model(base, peft.LoraConfig(**options, task_type="CAUSAL_LM")).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.copy_(parameter * (1 + noise) if parameter.dim() == 1 else noise)
    model.save_pretrained(folder / "peft")
    config = json.loads((folder / "peft" / CONFIG).read_text())
    (folder / "peft" / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": "../base"}))
    found: Tensor = model(TOKENS).logits.detach()
    return found


def unmerged_logits(opened: OpenedModel) -> Tensor:
    """Return the logits of a network with adapters of its own, which are not merged."""
    assert opened.adapters is not None
    network, mesh = GPT(opened.config, ParallelMesh()), ParallelMesh()
    add_adapters(network, opened.adapters.config)
    load_weights(opened.adapters.joined(), opened.what, nn.ModuleList([network]), None, mesh)
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    batch = MicroBatch(TOKENS, positions, first_keys=None, labels=None, loss_mask=None, key=RandomKey(0, ()))
    with torch.no_grad():
        found = network.eval()({}, batch).tensors[LOGITS]
    return found.transpose(0, 1)[..., : opened.config.vocab_size]


def distance(ours: Tensor, others: Tensor) -> float:
    return (ours - others).abs().max().item()


@pytest.mark.parametrize("name", wide_except(CASES, OFTEN))
def test_megalite_computes_what_peft_does(name: str, tmp_path: Path) -> None:
    family, options = CASES[name]
    expected = saved_by_peft(tmp_path, family, options)
    opened = open_folder(tmp_path / "peft")
    assert distance(logits(opened, TOKENS), expected) <= CLOSE
    assert distance(unmerged_logits(opened), expected) <= CLOSE
    assert distance(logits(open_huggingface(tmp_path / "base"), TOKENS), expected) >= MATTERS


def drawn_adapters(folder: Path, name: str, config: AdaptersConfig) -> OpenedModel:
    """Return a model with adapters of megalite's own, drawn at random."""
    theirs.save(folder / "base", name)
    base = open_huggingface(folder / "base")
    network = GPT(base.config, ParallelMesh(device=torch.device("meta")))
    add_adapters(network, config)
    generator = torch.Generator().manual_seed(5)
    own = {
        piece.tensor.name: torch.randn(piece.tensor.shape, generator=generator) * 0.1
        for parameter, piece in named_pieces(network)
        if parameter.requires_grad
    }
    path = str(folder / "base")
    adapters = Adapters(config, base.source, InMemory(own), tensors_of_training(base.config), path)
    return replace(base, source=adapters.merged(), adapters=adapters)


OWN: dict[str, tuple[str, AdaptersConfig]] = {
    "llama, dora": ("llama", AdaptersConfig(lora_rank=4, use_dora=True)),
    "llama, keys and ups": ("llama", AdaptersConfig(lora_rank=2, lora_alpha=3.0, lora_target_modules=("key", "up"))),
    "gpt2, queries of a layer": ("gpt2", AdaptersConfig(lora_rank=2, lora_target_modules=("layers.1.*.query",))),
    "gpt2, fused, rslora": ("gpt2", AdaptersConfig(lora_rank=3, lora_alpha=2.0, use_rslora=True)),
    "gpt-neox, fused, dora": ("gpt-neox", AdaptersConfig(lora_rank=2, use_dora=True)),
    "qwen3": ("qwen3", AdaptersConfig(lora_rank=2)),
    "llama, tables": (
        "llama",
        AdaptersConfig(lora_rank=3, lora_target_modules=("all-linear", "lm_head", "embed_tokens")),
    ),
    "llama, tables, dora": (
        "llama",
        AdaptersConfig(lora_rank=3, lora_target_modules=("lm_head", "up", "embed_tokens"), use_dora=True),
    ),
    "mixtral": ("mixtral", AdaptersConfig(lora_rank=3, lora_alpha=2.0)),
    "mixtral, gates, rslora": ("mixtral", AdaptersConfig(lora_rank=2, lora_target_modules=("gate",), use_rslora=True)),
    "mixtral, a layer": ("mixtral", AdaptersConfig(lora_rank=2, lora_target_modules=("layers.1.moe.*", "query"))),
    "olmoe": ("olmoe", AdaptersConfig(lora_rank=2)),
    "deepseek-v3, experts": (
        "deepseek-v3",
        AdaptersConfig(lora_rank=2, lora_target_modules=("moe.gate", "moe.up", "moe.down")),
    ),
    "gpt-oss, experts": ("gpt-oss", AdaptersConfig(lora_rank=2, lora_alpha=0.5, lora_target_modules=("moe.*",))),
    "nemotron, experts": ("nemotron-h", AdaptersConfig(lora_rank=2, lora_target_modules=("moe.up", "moe.down"))),
    "minimax-m2": ("minimax-m2", AdaptersConfig(lora_rank=2)),
    "qwen3-moe, experts": ("qwen3-moe", AdaptersConfig(lora_rank=2, lora_target_modules=("moe.*", "query"))),
}


@pytest.mark.parametrize("name", wide_except(OWN, ["llama, dora", "gpt2, fused, rslora"]))
def test_peft_computes_what_megalite_does(name: str, tmp_path: Path) -> None:
    opened = drawn_adapters(tmp_path, *OWN[name])
    write_peft(opened, tmp_path / "peft")
    base, _ = theirs.load(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    expected = model(TOKENS).logits.detach()
    assert distance(logits(opened, TOKENS), expected) <= CLOSE
    assert distance(unmerged_logits(opened), expected) <= CLOSE
    assert distance(logits(open_folder(tmp_path / "peft"), TOKENS), expected) <= CLOSE


def test_what_cannot_be_said_or_computed_is_refused(tmp_path: Path) -> None:
    theirs.save(tmp_path / "base", "llama")
    model = peft.get_peft_model(theirs.load(tmp_path / "base")[0], peft.LoraConfig(r=2, target_modules=["q_proj"]))
    folder = tmp_path / "peft"
    model.save_pretrained(folder)
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)

    def refused(changes: dict[str, Any], words: str, renamed: dict[str, Tensor] | None = None) -> None:
        plain = {**config, "base_model_name_or_path": str(tmp_path / "base")}
        (folder / CONFIG).write_text(json.dumps({**plain, **changes}))
        save_file(tensors if renamed is None else renamed, folder / WEIGHTS)
        with pytest.raises(CheckpointError, match=words):
            open_folder(folder)

    refused({"bias": "all"}, "bias is 'all', which megalite does not have")
    refused({"peft_type": "IA3"}, "only LORA is known")
    refused({"init_lora_weights": "pissa"}, "may have changed the base")
    refused({"modules_to_save": ["lm_head"]}, "modules_to_save is")
    refused({"r": -1}, "must be whole numbers above 0")
    refused({"r": 2.9}, "must be whole numbers above 0")
    refused({"alpha_pattern": ["a"]}, "must be objects")
    refused({"lora_dropout": "x"}, "lora_dropout is 'x', which is no share below 1")
    refused({"base_model_name_or_path": "x" * 5000}, "which is no folder of a base here")
    refused({"target_parameters": "w"}, "target_parameters is 'w', and no list of names")
    refused({"r": 3}, r"q_proj.lora_A.weight has shape \[2, 24\], and not \[3, 24\]")
    wide = {key: torch.zeros((25, 24) if "lora_A" in key else (24, 25)) for key in tensors}
    refused({"r": 25}, r"model\.safetensors: .*q_proj has rank 25, and no update of it has more than 24", wide)
    refused({"base_model_name_or_path": "meta-llama/Llama-3"}, "which is no folder of a base here")
    name = next(iter(tensors))
    refused({}, "belongs to no matrix", {name.replace("q_proj", "qq_proj"): tensors[name]})
    refused({}, "is missing", {name: tensors[name]})
    refused({}, "q_proj.lora_A.weight has NaN or infinities", tensors | {name: tensors[name] / 0})
    refused({}, "it has no adapters", {})
    changed = {**tensors, "base_model.model.lm_head.base_layer.weight": torch.zeros(2, 2)}
    refused({}, "lm_head.base_layer.weight has other values than the base", changed)
    experts = drawn_adapters(tmp_path / "deepseek", "deepseek-v3", AdaptersConfig(lora_rank=2))
    with pytest.raises(CheckpointError, match=r"PEFT takes the name of model\.layers\.0\.mlp\.gate_proj for that"):
        write_peft(experts, tmp_path / "out")
