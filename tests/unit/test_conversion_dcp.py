"""Folders of torch.distributed.checkpoint, and files of tensors, with the names of torchtitan and of transformers."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megalite.config import ModelConfig
from megalite.conversion.dcp import open_dcp, open_tensor_file
from megalite.conversion.opened import OpenedModel, logical_tensors
from megalite.conversion.verification import logits
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from tests.harness.rank_pool import RankPools

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # it says so even where that is asked
]

LOGITS = 1e-5  # of logits of about 1, in fp32, from two implementations
LLAMA = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, group_query_attention=True, num_query_groups=2, kv_channels=10,
    ffn_hidden_size=40, max_position_embeddings=64, vocab_size=53, position_embedding_type="rope", rotary_base=500.0,
    normalization="RMSNorm", norm_epsilon=1e-5, swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
    attention_dropout=0.0, untie_embeddings_and_output_weights=True,
)  # fmt: skip
QWEN3 = replace(LLAMA, qk_layernorm=True)
EXPERTS = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
DEEPSEEK = replace(
    LLAMA, multi_latent_attention=True, group_query_attention=False, num_query_groups=1, kv_channels=None,
    qk_layernorm=True, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8,
    num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=12, moe_layer_freq="[0,1]", mtp_num_layers=1,
    moe_shared_expert_intermediate_size=20, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
)  # fmt: skip
MODELS = {
    "llama3": LLAMA,
    "qwen3": replace(QWEN3, untie_embeddings_and_output_weights=False),
    "qwen3 with experts": replace(QWEN3, **EXPERTS),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3 without latents of queries": replace(DEEPSEEK, q_lora_rank=None, mtp_num_layers=None),
    "gpt_oss": replace(
        LLAMA, **EXPERTS, swiglu=False, quick_geglu=True, glu_linear_offset=1.0, activation_func_clamp_value=7.0,
        add_bias_linear=True, moe_router_bias=True, softmax_type="learnable",
    ),
}  # fmt: skip
TOKENS = torch.arange(2 * 32).view(2, 32) * 7 % 53


def random_weights(model: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        for name, shape in logical_tensors(model).items()
    }


def read(opened: OpenedModel) -> dict[str, Tensor]:
    """Return all weights, each filled in two parts, as two ranks would."""
    found = {}
    for name, kind in opened.source.tensors.items():
        found[name] = torch.full(kind.shape, torch.nan, dtype=kind.dtype)
        rows = kind.shape[0] // 2
        for offset, size in ((0, rows), (rows, kind.shape[0] - rows)):
            if size:
                corner, box = (offset, *(0,) * (len(kind.shape) - 1)), (size, *kind.shape[1:])
                opened.source.fill(name, Box(corner, box), found[name][offset : offset + size])
    return found


def check_same(opened: OpenedModel, weights: Mapping[str, Tensor]) -> None:
    found = read(opened)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert torch.equal(found[name], values), name


# ------------------------------------------------------------------------------------------------ torchtitan's names


def in_pairs(rows: Tensor, width: int) -> Tensor:
    """Return [heads x width, ...] rows with each head's channel i, of the first half, beside i + half."""
    heads = rows.reshape(-1, 2, width // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def titan_layer(layer: Mapping[str, Tensor], pairs: bool, newest: bool) -> dict[str, Tensor]:
    """Return the tensors of a layer as torchtitan has them. `layer`: logical tensors, without the layer's prefix."""
    attention = "attention.qkv_linear." if newest else "attention."
    experts = "moe.routed_experts.inner_experts." if newest else "moe.experts."

    def with_axes(name: str, axes: str) -> str:
        return f"{name}_{axes}" if newest else name

    found = {}
    for name, values in layer.items():
        kind, _, part = name.partition(".")
        flat = values.flatten(0, -2) if values.dim() > 1 else values
        match name:
            case "attention.query":
                found[f"{attention}wq.weight"] = in_pairs(flat, values.shape[1]) if pairs else flat
            case "attention.key_value":
                key, value = (values[:, at].flatten(0, 1) for at in (0, 1))
                found[f"{attention}wk.weight"] = in_pairs(key, values.shape[2]) if pairs else key
                found[f"{attention}wv.weight"] = value
            case "attention.query_bias":
                found[f"{attention}wq.bias"] = values.flatten()
            case "attention.key_value_bias":
                for at, letter in enumerate("kv"):
                    found[f"{attention}w{letter}.bias"] = values[:, at].flatten()
            case "attention.output" | "latent_attention.output":
                found["attention.wo.weight"] = values.flatten(1)
            case "attention.output_bias":
                found["attention.wo.bias"] = values
            case "attention.sink":
                found["attention.sinks"] = values
            case "attention.query_norm.weight" | "attention.key_norm.weight" | "latent_attention.query_norm.weight":
                found[f"attention.{part[0]}_norm.weight"] = values
            case "latent_attention.key_value_norm.weight":
                found["attention.kv_norm.weight"] = values
            case "latent_attention.query" | "latent_attention.query_up":
                found[f"attention.wq{'_b' * part.endswith('up')}.weight"] = flat
            case "latent_attention.query_down":
                found["attention.wq_a.weight"] = values
            case "latent_attention.key_value_down" | "latent_attention.key_value_up":
                found[f"attention.wkv_{'a' if part.endswith('down') else 'b'}.weight"] = flat
            case "mlp.gate_up" | "moe.shared.gate_up":
                block = "feed_forward" if kind == "mlp" else "moe.shared_experts"
                found[f"{block}.w1.weight"], found[f"{block}.w3.weight"] = values
            case "mlp.down" | "moe.shared.down":
                found[f"{'feed_forward' if kind == 'mlp' else 'moe.shared_experts'}.w2.weight"] = values
            case "moe.router":
                found["moe.router.gate.weight"] = values
            case "moe.router_bias":
                found["moe.router.gate.bias"] = values
            case "moe.gate_up" if "moe.gate_up_bias" in layer:
                found[with_axes(experts + "mlp1_weight", "EGD")] = values.transpose(1, 2).flatten(1, 2)
            case "moe.down" if "moe.gate_up_bias" in layer:
                found[with_axes(experts + "mlp2_weight", "EDF")] = values
            case "moe.gate_up_bias":
                found[with_axes(experts + "mlp1_bias", "EG")] = values.transpose(1, 2).flatten(1)
            case "moe.down_bias":
                found[with_axes(experts + "mlp2_bias", "ED")] = values
            case "moe.gate_up":
                for at, part in enumerate(("w1", "w3")):
                    found[with_axes(experts + part, "EFD")] = values[:, at]
            case "moe.down":
                found[with_axes(experts + "w2", "EDF")] = values
            case "input_norm.weight" | "latent_attention_norm.weight":
                found["attention_norm.weight"] = values
            case "mlp_norm.weight":
                found["ffn_norm.weight"] = values
            case "moe.expert_bias":
                found[with_axes("moe.expert_bias", "E")] = values
            case _:
                raise AssertionError(name)
    return found


def titan_state(model: ModelConfig, weights: Mapping[str, Tensor], newest: bool = True) -> dict[str, Tensor]:
    """Return the state of torchtitan's model, of version 0.3 or before. It has a tied matrix twice."""
    pairs = model.softmax_type == "vanilla" and not model.qk_layernorm
    head = "lm_head.weight" if newest else "output.weight"
    state = {"tok_embeddings.weight": weights["embedding.word"], "norm.weight": weights["final_norm.weight"]}
    state[head] = weights.get("output", weights["embedding.word"])
    of_depth = {
        "embedding_norm.weight": "enorm.weight", "hidden_norm.weight": "hnorm.weight",
        "projection": "eh_proj.weight", "final_norm.weight": "mtp_norm.weight",
    }  # fmt: skip
    layers: dict[str, dict[str, Tensor]] = {}
    for name, values in weights.items():
        local = name.removeprefix("state/")
        if (match := re.fullmatch(r"mtp\.(\d+)\.(?!layers)(.*)", local)) is not None:
            state[f"mtp_layers.{match[1]}.{of_depth[match[2]]}"] = values.flatten(1) if values.dim() > 1 else values
        elif (match := re.fullmatch(r"(?:mtp\.(\d+)\.)?layers\.(\d+)\.(.*)", local)) is not None:
            begin = f"layers.{match[2]}." if match[1] is None else f"mtp_layers.{match[1]}."
            layers.setdefault(begin, {})[match[3]] = values
    for begin, layer in layers.items():
        state |= {begin + name: values.clone() for name, values in titan_layer(layer, pairs, newest).items()}
    return state


def save(state: Mapping[str, Any], folder: Path) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("newest", [True, False], ids=["0.3", "0.2"])
@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_torchtitan_are_read(name: str, newest: bool, tmp_path: Path) -> None:
    model = MODELS[name]
    weights = random_weights(model)
    folder = save(titan_state(model, weights, newest), tmp_path)

    opened = open_dcp(folder, model)

    assert opened.what == f"torchtitan, {folder}"
    assert opened.config == model
    check_same(opened, weights)


def test_heads_of_its_llama_are_rotated_in_pairs(tmp_path: Path) -> None:
    """Heads are those of the files under --rotary-interleaved, which rotates channels as torchtitan does."""
    pairs = replace(LLAMA, rotary_interleaved=True)
    state = titan_state(LLAMA, random_weights(LLAMA))
    folder = save(state, tmp_path)
    opened = open_dcp(folder, pairs)

    query = state["layers.1.attention.qkv_linear.wq.weight"]
    assert torch.equal(read(opened)["layers.1.attention.query"], query.view(4, 10, 24))
    difference = logits(opened, TOKENS) - logits(open_dcp(folder, LLAMA), TOKENS)
    assert difference.abs().max() < LOGITS


def test_its_qwen3_cannot_be_one_that_rotates_in_pairs(tmp_path: Path) -> None:
    folder = save(titan_state(QWEN3, random_weights(QWEN3)), tmp_path)
    with pytest.raises(CheckpointError, match="adjacent channels in its Llama alone; no family of Hugging Face has"):
        open_dcp(folder, replace(QWEN3, rotary_interleaved=True))


def test_a_bias_of_the_choice_is_left_out_if_it_is_zero(tmp_path: Path) -> None:
    """All of torchtitan's models with experts have one, in other programs only those with sigmoid scores."""
    model = MODELS["qwen3 with experts"]
    weights = random_weights(model)
    state = titan_state(model, weights) | {f"layers.{layer}.moe.expert_bias_E": torch.zeros(6) for layer in (0, 1)}
    check_same(open_dcp(save(state, tmp_path / "zero"), model), weights)

    state["layers.1.moe.expert_bias_E"][3] = 0.001
    with pytest.raises(CheckpointError, match=r"layers.1.moe.expert_bias is not zero, but the network of the flags"):
        open_dcp(save(state, tmp_path / "other"), model)


# ------------------------------------------------------------------------------------------------ what is around names


@pytest.mark.wide_except(
    "torchtitan-", "torchtitan-app.model._orig_mod.", "transformers-model.", "transformers-module."
)
@pytest.mark.parametrize("prefix", ["", "model.", "app.model.", "module.", "_orig_mod.", "app.model._orig_mod."])
@pytest.mark.parametrize("names", ["torchtitan", "transformers"])
def test_prefixes_and_other_state_are_passed_over(names: str, prefix: str, tmp_path: Path) -> None:
    weights = random_weights(QWEN3)
    state = titan_state(QWEN3, weights)
    if names == "transformers":
        state = huggingface_state(weights)
    within = {prefix + name.replace("layers.1.", "layers.1._checkpoint_wrapped_module."): state[name] for name in state}
    optimizer = {f"optim.state.{name}.exp_avg": torch.ones_like(values) for name, values in state.items()}
    steps = {f"optim.state.{name}.step": torch.tensor(3) for name in state}
    others = {"ema": state, "train_state": {"step": 3}, "freqs_cis": torch.ones(4, dtype=torch.complex64)}
    folder = save(within | optimizer | steps | others, tmp_path)

    opened = open_dcp(folder, QWEN3)

    assert ("torchtitan" in opened.what) == (names == "torchtitan")
    check_same(opened, weights)


def huggingface_state(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of QWEN3 with the names of transformers."""
    state = {"model.embed_tokens.weight": weights["embedding.word"], "model.norm.weight": weights["final_norm.weight"]}
    state["lm_head.weight"] = weights["output"]
    for layer in (0, 1):
        ours, begin = f"layers.{layer}.", f"model.layers.{layer}."
        gate, up = weights[ours + "mlp.gate_up"]
        state |= {
            begin + "self_attn.q_proj.weight": weights[ours + "attention.query"].flatten(0, 1),
            begin + "self_attn.k_proj.weight": weights[ours + "attention.key_value"][:, 0].flatten(0, 1),
            begin + "self_attn.v_proj.weight": weights[ours + "attention.key_value"][:, 1].flatten(0, 1),
            begin + "self_attn.o_proj.weight": weights[ours + "attention.output"].flatten(1),
            begin + "self_attn.q_norm.weight": weights[ours + "attention.query_norm.weight"],
            begin + "self_attn.k_norm.weight": weights[ours + "attention.key_norm.weight"],
            begin + "input_layernorm.weight": weights[ours + "input_norm.weight"],
            begin + "post_attention_layernorm.weight": weights[ours + "mlp_norm.weight"],
            begin + "mlp.gate_proj.weight": gate,
            begin + "mlp.up_proj.weight": up,
            begin + "mlp.down_proj.weight": weights[ours + "mlp.down"],
        }
    return {name: values.clone() for name, values in state.items()}


def test_the_vocabulary_may_be_that_of_the_embedding(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    folder = save(titan_state(LLAMA, weights), tmp_path)

    opened = open_dcp(folder, replace(LLAMA, vocab_size=None))

    assert opened.config == LLAMA
    check_same(opened, weights)
    with pytest.raises(CheckpointError, match=r"has no embedding, such as tok_embeddings.weight: its tensors are a$"):
        open_dcp(save({"a": torch.ones(2)}, tmp_path / "other"), replace(LLAMA, vocab_size=None))


def test_two_copies_of_a_tied_matrix_are_the_same(tmp_path: Path) -> None:
    model = MODELS["qwen3"]
    state = titan_state(model, random_weights(model))
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"output.weight and tok_embeddings.weight differ, but the flags tie"):
        open_dcp(save(state, tmp_path), model)


# ------------------------------------------------------------------------------------------------ chunks of ranks


def save_sharded(state: Mapping[str, Tensor], folder: Path) -> None:
    """Save each tensor cut over the ranks along its first dimension, or along the last, as FSDP and TP cut them."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    cut = {
        name: distribute_tensor(values, mesh, [Shard(values.dim() - 1 if "w2" in name else 0)], src_data_rank=None)
        for name, values in state.items()
    }
    dcp.save({"model": cut, "step": 3}, checkpoint_id=folder)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_chunks_of_ranks_are_put_together(ranks: int, rank_pools: RankPools, tmp_path: Path) -> None:
    """One of three ranks has no expert of four."""
    model = replace(MODELS["qwen3 with experts"], num_experts=4)
    weights = random_weights(model)
    rank_pools(ranks).run(save_sharded, titan_state(model, weights), tmp_path)
    assert len({path.name for path in tmp_path.glob("*.distcp")}) == ranks

    check_same(open_dcp(tmp_path, model), weights)


# ------------------------------------------------------------------------------------------------ files


def test_a_file_of_tensors_is_read(tmp_path: Path) -> None:
    weights = random_weights(QWEN3)
    torch.save({"model": titan_state(QWEN3, weights), "step": 3, "optimizer": {"state": {}}}, tmp_path / "titan.pt")
    save_file(huggingface_state(weights), tmp_path / "all.safetensors")

    check_same(open_tensor_file(tmp_path / "titan.pt", QWEN3), weights)
    opened = open_tensor_file(tmp_path / "all.safetensors", QWEN3)
    assert opened.what == f"Hugging Face (qwen3), {tmp_path / 'all.safetensors'}"
    check_same(opened, weights)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "model.pt"
    for content, message in (([1], "has no tensors by name"), ({"a": Hostile()}, "expected, but not there")):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=message):
            open_tensor_file(path, LLAMA)
    path.write_bytes(b"text")
    with pytest.raises(CheckpointError, match=r"model.pt cannot be read"):
        open_tensor_file(path, LLAMA)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read: No such file"):
        open_tensor_file(tmp_path / "model.safetensors", LLAMA)
    assert not (tmp_path / "made").exists()


# ------------------------------------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"qk_layernorm": True},
            r"of the flags; torchtitan is the nearest:\n"
            r"  expected, but not there: layers.0.attention.k_norm.weight, .*\n"
            r"  there, but not expected: none\n"
            r"  further away: Hugging Face \(qwen3\)",
        ),
        (
            {"num_layers": 1},
            r"  expected, but not there: none\n"
            r"  there, but not expected: layers.1.attention.wk.weight, (\S+, ){2}\S+ and 5 more\n",
        ),
        ({"ffn_hidden_size": 44}, r"feed_forward.w1.weight has shape \[40, 24\], but the model has \[44, 24\]"),
        ({"vocab_size": 54}, r"tok_embeddings.weight has shape \[53, 24\], but the model has \[54, 24\]"),
        (
            {"normalization": "LayerNorm"},
            r"expected, but not there: layers.0.attention_norm.bias",
        ),
    ],
)
def test_another_network_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(titan_state(LLAMA, random_weights(LLAMA)), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_dcp(folder, replace(LLAMA, **changes))


def test_other_names_are_listed(tmp_path: Path) -> None:
    folder = save({"transformer.block.0.weight": torch.ones(2, 2), "b": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointError) as refused:
        open_dcp(folder, LLAMA)
    assert "there: tok_embeddings.weight (torchtitan), model.embed_tokens.weight (Hugging Face" in str(refused.value)
    assert "  there, but not expected: transformer.block.0.weight, b" in str(refused.value).splitlines()


def test_weights_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    state = titan_state(LLAMA, random_weights(LLAMA))
    state["norm.weight"] = torch.ones(24, dtype=torch.int64)
    with pytest.raises(CheckpointError, match=r"norm.weight has dtype torch.int64, which no weight"):
        open_dcp(save(state, tmp_path), LLAMA)


def test_a_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    state = titan_state(LLAMA, random_weights(LLAMA))
    folder = save(state | {"module.norm.weight": state["norm.weight"]}, tmp_path)
    with pytest.raises(CheckpointError, match=r"has norm.weight twice"):
        open_dcp(folder, LLAMA)


def changed(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return a function that changes the metadata of a folder."""

    def apply(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def outside(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"


def of_another_size(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata["norm.weight"].chunks[0]
    chunk.sizes = torch.Size([2**60])


def without_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["norm.weight"].chunks = []


def twice(metadata: Any) -> None:
    metadata.state_dict_metadata["norm.weight"].chunks *= 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / ".metadata").unlink(), ".metadata cannot be read: No such file"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), ".metadata cannot be read"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp cannot be read: No such file"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 300), "__0_0.distcp cannot be read"),
        (changed(outside), "which is not in its folder"),
        (changed(of_another_size), "norm.weight has a chunk of more bytes than its place"),
        (changed(without_chunks), r"the pieces of norm.weight \[\] do not have each of its elements once"),
        (changed(twice), "does not describe a checkpoint .KeyError"),
        (changed(lambda metadata: metadata.storage_data.clear()), "does not describe a checkpoint .KeyError"),
    ],
)
def test_a_damaged_folder_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = save(titan_state(LLAMA, random_weights(LLAMA)), tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read(open_dcp(folder, LLAMA))


def test_metadata_run_nothing(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    folder = save(titan_state(LLAMA, random_weights(LLAMA)), tmp_path / "dcp")
    changed(lambda metadata: setattr(metadata, "planner_data", Hostile()))(folder)

    check_same(open_dcp(folder, LLAMA), random_weights(LLAMA))
    assert not (tmp_path / "made").exists()
