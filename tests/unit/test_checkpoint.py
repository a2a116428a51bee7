"""Contents of a checkpoint, and errors: in one process, on real files."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalite import checkpoint
from megalite.checkpoint import Candidates, Plan, Saver, TrainingState, manifest, shard_file
from megalite.checkpoint.tensors import ByteRange, Kind, TensorBox
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.errors import CheckpointError, CorruptCheckpointError
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box

MODEL = ModelConfig(
    num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=10, make_vocab_size_divisible_by=4,
    max_position_embeddings=4,
)  # fmt: skip
ADAM = OptimizerConfig(lr=0.1)
STATE = TrainingState(iteration=7, consumed_samples=28, optimizer_steps=6)
MESH = ParallelMesh()


def build(
    model: ModelConfig = MODEL, optimizer: OptimizerConfig = ADAM, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[GPT, Optimizer]:
    """Return a model and an optimizer whose elements, except padding, are drawn from `seed`."""
    network = GPT(model, MESH, dtype=dtype)
    initialize(network, seed)
    wide = torch.promote_types(dtype, torch.float32)
    made = make_optimizer([network], MESH, optimizer, DataParallel(gradient_dtype=wide, bucket_size=500))
    generator = torch.Generator().manual_seed(seed)
    for state in made.slices():
        for values in state.state.values():
            for piece in state.parameter.sharding.pieces:
                view = piece.view(values.view(state.parameter.shape))
                view.copy_(torch.randn(view.shape, generator=generator))
    return network, made


def bits(network: GPT, optimizer: Optimizer | None) -> list[torch.Tensor]:
    states = [values.clone() for state in optimizer.slices() for values in state.state.values()] if optimizer else []
    return [parameter.detach().clone() for parameter in network.parameters()] + states


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def save(
    directory: Path, network: GPT, optimizer: Optimizer, training: TrainingState = STATE, *, state: bool = True
) -> Path:
    saver = Saver(directory, optimizer, Plan.alone(optimizer), state=state)
    path = saver.save(training, {"model": asdict(network.config)})
    assert isinstance(path, Path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", [ADAM, OptimizerConfig(lr=0.1, optimizer="sgd", sgd_momentum=0.0)])
def test_weights_state_and_place_in_training_come_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, optimizer: OptimizerConfig
) -> None:
    network, made = build(optimizer=optimizer, dtype=dtype)
    path = save(tmp_path, network, made)
    other, remade = build(optimizer=optimizer, dtype=dtype, seed=1)
    assert not same(bits(network, made), bits(other, remade))

    assert checkpoint.latest(tmp_path) == path == tmp_path / "iter_0000007"
    assert checkpoint.load(path, other, remade, MESH) == STATE

    assert same(bits(network, made), bits(other, remade))
    assert remade.steps == 6
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "7"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank_00000.safetensors"]


def test_a_parameter_that_is_frozen_within_a_run_keeps_its_state(tmp_path: Path) -> None:
    network, made = build()
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    path = save(tmp_path, network, made)
    other, remade = build(seed=1)

    checkpoint.load(path, other, remade, MESH)

    assert same(bits(network, made), bits(other, remade))


def test_weights_alone_load_from_a_full_checkpoint_and_from_one_without_an_optimizer(tmp_path: Path) -> None:
    network, optimizer = build()
    for directory, state in ((tmp_path / "full", True), (tmp_path / "weights", False)):
        path = save(directory, network, optimizer, state=state)
        other = GPT(MODEL, MESH)  # its memory is not initialized: padding must become zero
        for parameter in other.parameters():
            parameter.detach().fill_(torch.nan)
        checkpoint.load(path, other, None, MESH)
        assert same(bits(network, None), bits(other, None))
    with pytest.raises(CheckpointError, match="it has only weights, but this run also needs exp_avg, exp_avg_sq"):
        checkpoint.load(path, *build(), MESH)


def test_any_reader_of_safetensors_finds_the_weights_by_global_name_unpadded(tmp_path: Path) -> None:
    network, optimizer = build()
    path = save(tmp_path, network, optimizer)

    tensors = load_file(path / "rank_00000.safetensors")

    assert torch.equal(tensors["model/embedding.word@0,0"], network.embedding.word.weight.detach()[:10])
    assert {name.split("/")[0] for name in tensors} == {"model", "optimizer"}
    described = json.loads((path / "manifest.json").read_text())
    assert described["tensors"]["model/layers.1.attention.query"]["shape"] == [2, 4, 8]
    assert described["training"] == {
        "iteration": 7,
        "consumed_samples": 28,
        "optimizer_steps": 6,
        "loss_scale": None,
        "seen_samples": None,
        "evaluation_left": False,
    }
    assert checkpoint.read_config(path) == json.loads(json.dumps({"model": asdict(MODEL)}))
    assert checkpoint.model_config(path, checkpoint.read_config(path)) == MODEL


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 16}, r"model/embedding.word has shape \[10, 8\] in it and \[10, 16\] in this run's model"),
        ({"vocab_size": 11}, r"model/embedding.word has shape \[10, 8\] in it and \[11, 8\]"),
        ({"num_layers": 3}, r"model/layers.2.attention.query \[2, 4, 8\] is not in it: it is from another model"),
        ({"num_layers": 1}, r"model/layers.1.attention.key_value \[2, 2, 4, 8\] has no place in this run's model"),
        ({"untie_embeddings_and_output_weights": True}, r"model/output \[10, 8\] is not in it"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = save(tmp_path, *build())
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, *build(replace(MODEL, **change)), MESH)


NEW = {
    "masters": ADAM,
    "remainders": OptimizerConfig(lr=0.1, use_precision_aware_optimizer=True, store_param_remainders=True),
}


def assert_new(optimizer: Optimizer, masters: Mapping[str, torch.Tensor]) -> None:
    """Assert that no update was made, moments are zero, and masters have the given values (by name)."""
    assert optimizer.steps == 0
    for state in optimizer.slices():
        kept = {name: v if isinstance(v, torch.Tensor) else v.read() for name, v in state.state.items()}
        assert not kept["exp_avg"].any()
        assert not kept["exp_avg_sq"].any()
        whole = torch.zeros(state.parameter.shape)
        for piece in state.parameter.sharding.pieces:
            piece.view(whole).copy_(masters[piece.tensor.name])
        assert torch.equal(kept["master"], whole.flatten()[state.start : state.stop])


def named(network: GPT) -> dict[str, torch.Tensor]:
    return {piece.tensor.name: piece.view(parameter.detach()).clone() for parameter, piece in named_pieces(network)}


@pytest.mark.parametrize("name", NEW)
def test_a_new_optimizer_begins_from_the_weights_that_were_loaded(name: str, tmp_path: Path) -> None:
    """The loaded weights have 16 bits, with any masters and state."""
    path = save(tmp_path, *build(dtype=torch.bfloat16))
    weights = named(build(dtype=torch.bfloat16)[0])
    network = GPT(MODEL, MESH, dtype=torch.bfloat16)
    initialize(network, 5)
    optimizer = make_optimizer([network], MESH, NEW[name], DataParallel(torch.float32, bucket_size=500))
    optimizer.steps = 3
    checkpoint.load(path, network, optimizer, MESH, state=False)
    assert all(torch.equal(values, weights[name]) for name, values in named(network).items())
    assert_new(optimizer, {name: values.float() for name, values in weights.items()})


class Given:
    """Source of tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.values = tensors
        self.tensors = {name: Kind(tuple(values.shape), values.dtype) for name, values in tensors.items()}

    def fill(self, name: str, box: Box, values: torch.Tensor) -> None:
        values.copy_(self.values[name][box.slices()])


@pytest.mark.parametrize("name", NEW)
def test_weights_of_others_are_rounded_and_their_masters_are_not(name: str) -> None:
    weights = named(build(seed=3)[0])
    network = GPT(MODEL, MESH, dtype=torch.bfloat16)
    initialize(network, 5)
    optimizer = make_optimizer([network], MESH, NEW[name], DataParallel(torch.float32, bucket_size=500))
    checkpoint.load_weights(Given(weights), "a source", network, optimizer, MESH)
    for tensor, values in named(network).items():
        assert (values.float() - weights[tensor]).abs().max() <= 2**-8 * weights[tensor].abs().max()
    assert_new(optimizer, weights)


@pytest.mark.parametrize("name", NEW)
def test_weights_that_are_not_loaded_keep_their_values_in_masters_too(name: str) -> None:
    weights = named(build(seed=3)[0])
    network = GPT(MODEL, MESH, dtype=torch.bfloat16)
    initialize(network, 5)
    optimizer = make_optimizer([network], MESH, NEW[name], DataParallel(torch.float32, bucket_size=500))
    kept = "embedding.word"
    first = named(network)[kept].float()
    others = {each: values for each, values in weights.items() if each != kept}
    checkpoint.load_weights(Given(others), "a source", network, optimizer, MESH, {kept})
    assert first.any()
    assert_new(optimizer, {**others, kept: first})


def test_weights_of_another_precision_come_from_the_finest_there_are(tmp_path: Path) -> None:
    """Weights with more bits come from masters; masters come from weights without masters."""
    low, high = build(dtype=torch.bfloat16), build(seed=1)
    masters = {
        piece.tensor.name: piece.view(state.state["master"].view(state.parameter.shape))
        for state in low[1].slices()
        for piece in state.parameter.sharding.pieces
    }
    checkpoint.load(save(tmp_path / "low", *low), *high, MESH, casts=True)
    assert all(torch.equal(values, masters[name]) for name, values in named(high[0]).items())
    back, _ = other = build(dtype=torch.bfloat16, seed=2)
    checkpoint.load(save(tmp_path / "high", *high), *other, MESH, casts=True, state=False)
    assert_new(other[1], masters)
    assert all(torch.equal(values, masters[name].bfloat16()) for name, values in named(back).items())


def test_nothing_is_cast_and_no_optimizer_state_is_left_over(tmp_path: Path) -> None:
    path = save(tmp_path, *build())
    with pytest.raises(
        CheckpointError, match=r"is float32 in it and float64 in this run.*without --bf16, --fp16 and --fp64"
    ):
        checkpoint.load(path, *build(dtype=torch.float64), MESH)
    with pytest.raises(CheckpointError, match="is exp_avg, exp_avg_sq for the weights, but this run needs nothing"):
        checkpoint.load(path, *build(optimizer=OptimizerConfig(lr=0.1, optimizer="sgd", sgd_momentum=0.0)), MESH)


def test_the_optimizers_state_is_cast_where_it_is_asked_for(tmp_path: Path) -> None:
    """A cast to fewer bits rounds; the cast back to more bits restores the same values."""
    narrow = replace(ADAM, main_params_dtype="fp16", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    wide = build(dtype=torch.bfloat16)
    less = build(optimizer=narrow, dtype=torch.bfloat16, seed=1)
    path = save(tmp_path / "wide", *wide)
    with pytest.raises(CheckpointError, match=r"is float32 in it and .* in this run.* give --main-params-dtype"):
        checkpoint.load(path, *less, MESH)
    checkpoint.load(path, *less, MESH, casts=True)
    assert {values.dtype for part in less[1].slices() for values in part.state.values()} == {
        torch.float16,
        torch.bfloat16,
    }
    for ours, theirs in zip(bits(*less), bits(*wide), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))
    back = build(dtype=torch.bfloat16, seed=2)
    checkpoint.load(save(tmp_path / "less", *less), *back, MESH, casts=True)
    for ours, theirs in zip(bits(*back), bits(*less), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))


def test_equal_shapes_do_not_hide_another_function(tmp_path: Path) -> None:
    path = save(tmp_path, *build())
    saved = checkpoint.read_config(path)
    checkpoint.check_compatible(path, saved, replace(MODEL, hidden_dropout=0.0, ffn_hidden_size=32, rotary_base=5.0))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_compatible(path, saved, replace(MODEL, norm_epsilon=1e-6, squared_relu=True))
    assert "norm_epsilon: 1e-05 in the checkpoint, 1e-06 in this run" in str(caught.value)
    assert "squared_relu: False in the checkpoint, True in this run" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_compatible(path, saved, replace(MODEL, num_layers=MODEL.num_layers + 1))
    assert len(str(caught.value).splitlines()) == 2
    rotary = replace(MODEL, position_embedding_type="rope")
    path = save(tmp_path, *build(rotary))
    with pytest.raises(CheckpointError, match=r"rotary_base: 10000\.0 in the checkpoint, 500000\.0 in this run"):
        checkpoint.check_compatible(path, checkpoint.read_config(path), replace(rotary, rotary_base=500000.0))


ROPE = replace(MODEL, position_embedding_type="rope")
YARN = replace(
    ROPE, position_embedding_type="yarn", rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=16
)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelConfig], Path]:
    """Return a checkpoint of a network, the same at each call."""
    return cache(lambda model: save(tmp_path_factory.mktemp("model"), *build(model)))


@pytest.mark.parametrize(
    ("model", "changes", "same"),
    [
        (MODEL, {"use_parallel_residual": True}, False),
        (MODEL, {"scale_embeddings": True}, False),
        (MODEL, {"apply_layernorm_1p": True}, False),
        (MODEL, {"exact_gelu": True}, False),
        (MODEL, {"add_qkv_bias": True}, True),
        (replace(MODEL, add_bias_linear=False), {"add_qkv_bias": True}, False),
        (replace(MODEL, ffn_hidden_size=8, swiglu=True), {"swiglu": False, "geglu": True}, False),
        (MODEL, {"window_size": "3,0"}, False),
        (replace(MODEL, window_size="3,0"), {"window_attn_skip_freq": "[1]*" + str(MODEL.num_layers)}, True),
        (replace(ROPE, window_size="3,0"), {"window_rotary_base": 500.0}, False),
        (ROPE, {"window_rotary_base": 500.0}, True),
        (MODEL, {"sandwich_norm": True}, False),
        (MODEL, {"final_logit_softcapping": 30.0}, False),
        (MODEL, {"attn_logit_softcapping": 50.0}, False),
        (MODEL, {"attention_output_gate": True}, False),
        (MODEL, {"softmax_type": "off-by-one"}, False),
        (replace(MODEL, ffn_hidden_size=8, swiglu=True), {"activation_func_clamp_value": 7.0}, False),
        (MODEL, {"moe_router_bias": True}, True),
        (ROPE, {"no_rope_freq": "1"}, False),
        (ROPE, {"no_rope_freq": str([0] * MODEL.num_layers)}, True),
        (MODEL, {"no_rope_freq": "1"}, True),
        (MODEL, {"output_norm_freq": "1"}, False),
        (MODEL, {"output_norm_freq": str([0] * MODEL.num_layers)}, True),
        (MODEL, {"linear_norm_epsilon": 1e-3}, True),
        (MODEL, {"query_pre_attn_scalar": 3.0}, False),
        (MODEL, {"query_pre_attn_scalar": float(MODEL.head_dim)}, True),
        (ROPE, {"rotary_seq_len_interpolation_factor": 2.0}, False),
        (ROPE, {"rotary_interleaved": True}, False),
        (MODEL, {"rotary_interleaved": True}, True),
        (replace(ROPE, use_rope_scaling=True), {"rope_scaling_low_freq_factor": 2.0}, False),
        (replace(ROPE, use_rope_scaling=True), {"rope_scaling_original_max_position_embeddings": 4096}, False),
        (ROPE, {"rope_scaling_low_freq_factor": 2.0, "mscale": 2.0, "yarn_beta_fast": 9.0}, True),
        (YARN, {"rotary_scaling_factor": 8.0}, False),
        (YARN, {"mscale": 2.0}, False),
        (replace(YARN, yarn_attention_factor=1.1), {"mscale": 2.0}, True),
    ],
)
def test_options_of_the_network_belong_to_the_function(
    model: ModelConfig, changes: dict[str, object], same: bool, saved_once: Callable[[ModelConfig], Path]
) -> None:
    path = saved_once(model)
    saved = checkpoint.read_config(path)
    checkpoint.check_compatible(path, saved, model)
    if same:
        checkpoint.check_compatible(path, saved, replace(model, **changes))
    else:
        with pytest.raises(CheckpointError, match=f"{next(iter(changes))}: "):
            checkpoint.check_compatible(path, saved, replace(model, **changes))


@pytest.mark.parametrize(
    ("saved", "changes"),
    [
        (YARN, "rotary_scaling_factor 4.0 -> 8.0"),
        (replace(YARN, mscale=2.0, yarn_beta_slow=2.0), "rotary_scaling_factor 4.0 -> 8.0, mscale 2.0 -> 1.0, "
         "yarn_beta_slow 2.0 -> 1.0"),
        (replace(ROPE, rotary_base=9.0, use_rope_scaling=True), "position_embedding_type rope -> yarn, "
         "rotary_base 9.0 -> 10000.0, use_rope_scaling True -> False, rotary_scaling_factor 1.0 -> 8.0, "
         "yarn_original_max_position_embeddings None -> 16"),
        (MODEL, None),
        (replace(YARN, rotary_interleaved=True), None),
        (replace(YARN, rotary_percent=0.5), None),
        (replace(YARN, no_rope_freq="1"), None),
    ],
)  # fmt: skip
def test_base_and_scaling_of_rotary_embeddings_may_change_and_nothing_else(
    saved: ModelConfig, changes: str | None
) -> None:
    longer = replace(YARN, rotary_scaling_factor=8.0)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_same_function("it", saved, longer)
    assert ("--allow-changed-rotary goes on" in str(caught.value)) == (changes is not None)
    other, told = checkpoint.with_rotary_of(saved, longer)
    if changes is not None:
        checkpoint.check_same_function("it", other, longer)
        assert told == changes
    else:
        with pytest.raises(CheckpointError):
            checkpoint.check_same_function("it", other, longer)
    assert checkpoint.with_rotary_of(saved, saved) == (saved, "")


def test_a_box_missing_from_the_manifest_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, *build())
    read = checkpoint.read_manifest(path)
    word = read.tensors["model/embedding.word"]
    rest = replace(word, boxes=tuple(replace(b, box=b.box.flat_range(0, 72)[0][0]) for b in word.boxes))
    (path / "manifest.json").write_text(replace(read, tensors=read.tensors | {"model/embedding.word": rest}).to_json())
    with pytest.raises(CheckpointError, match=r"model/embedding.word is incomplete in it"):
        checkpoint.load(path, *build(), MESH)


# ------------------------------------------------------------------------------------------------------ damage


def test_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, *build())
    shard = path / "rank_00000.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=f"rank_00000.safetensors: it has {len(good) - 1} bytes of {len(good)}"):
        checkpoint.load(path, *build(), MESH)
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors: the checksum of .* does not match"):
        checkpoint.load(path, *build(), MESH)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors: it is missing"):
        checkpoint.load(path, *build(), MESH)
    described = path / "manifest.json"
    described.write_text(described.read_text().replace('"iteration": 7', '"iteration": 8'))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged or not ours: its checksum does not match"):
        checkpoint.load(path, *build(), MESH)
    for text in ("", "[]", "{}", "\x00\xff"):
        described.write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest.json is damaged or not ours"):
            checkpoint.read_manifest(path)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no manifest\.json"):
        checkpoint.load(tmp_path, *build(), MESH)


NORM = "tensors", "model/final_norm.weight"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("files", "../../secret"), {"size": 4096, "checksum": 0}),
        (("files", "/etc/passwd"), {"size": 4096, "checksum": 0}),
        (("files", ".."), {"size": 4096, "checksum": 0}),
        ((*NORM, "dtype"), "nn"),
        ((*NORM, "shape"), [2, 4]),
        ((*NORM, "boxes", 0, "file"), "../../secret"),
        ((*NORM, "boxes", 0, "file"), "rank_00001.safetensors"),
        ((*NORM, "boxes", 0, "start"), -1),
        ((*NORM, "boxes", 0, "start"), 1 << 60),
        ((*NORM, "boxes", 0, "start"), 0.5),
        ((*NORM, "boxes", 0, "offset"), [-1]),
        ((*NORM, "boxes", 0, "offset"), [0, 0]),
        ((*NORM, "boxes", 0, "size"), [0]),
        ((*NORM, "boxes", 0, "size"), [1 << 60]),
        ((*NORM, "boxes", 0, "checksums"), ""),
    ],
    ids=str,
)
def test_a_manifest_from_anywhere_leads_nowhere_else(tmp_path: Path, where: tuple[str | int, ...], value: Any) -> None:
    path = save(tmp_path, *build()) / "manifest.json"
    fields: Any = json.loads(path.read_text())
    place = fields
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    del fields["checksum"]
    fields["checksum"] = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    path.write_text(json.dumps(fields))
    with pytest.raises(CorruptCheckpointError, match=r"manifest.json is damaged or not ours"):
        checkpoint.load(path.parent, *build(), MESH)


def test_a_format_of_the_future_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", 3)
    path = save(tmp_path, *build())
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="its format version is not 2"):
        checkpoint.read_manifest(path)


# ------------------------------------------------------------------------------------------------------ the latest


def test_the_tracker_says_which_one_is_loaded(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.find_candidates(tmp_path, MESH).paths == ()
    first = save(tmp_path, *build())
    second = save(tmp_path, *build(), replace(STATE, iteration=12345678))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert checkpoint.latest(tmp_path) == second
    assert second.name == "iter_12345678"
    assert checkpoint.find_candidates(tmp_path, MESH) == Candidates((second, first))
    tracker.write_text("7\n")
    found = checkpoint.find_candidates(tmp_path, MESH)
    assert found.paths == (first,)
    assert "iter_12345678 in" in found.notes[0]
    assert "left alone" in found.notes[0]
    for text in ("8", "", "release"):
        tracker.write_text(text)
        with pytest.raises(
            CheckpointError, match=r"latest_checkpointed.*not a checkpoint here: write one of 7, 12345678"
        ):
            checkpoint.latest(tmp_path)
    tracker.unlink()
    assert checkpoint.latest(tmp_path) == second
    assert checkpoint.find_candidates(tmp_path, MESH) == Candidates((second, first))


def test_a_tracker_that_names_nothing_is_not_believed(tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text in ("8", "release"):
        tracker.write_text(text)
        if text == "release":
            with pytest.raises(CheckpointError, match="names 'release', not a checkpoint here: there is none"):
                checkpoint.find_candidates(tmp_path, MESH)
    first, second = (save(tmp_path, *build(), replace(STATE, iteration=iteration)) for iteration in (7, 9))
    tracker.write_text("8")
    assert checkpoint.find_candidates(tmp_path, MESH).paths == (tmp_path / "iter_0000008", first)
    tracker.write_text("6")
    with pytest.raises(CheckpointError, match="names '6', not a checkpoint here: write one of 7, 9 into it"):
        checkpoint.find_candidates(tmp_path, MESH)
    for text in ("release", "", "\x00\x00"):
        tracker.write_text(text)
        found = checkpoint.find_candidates(tmp_path, MESH)
        assert found.paths == (second, first)
        assert f"has {text!r}, which is not a step" in found.notes[0]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "iter_0000007"
    foreign.mkdir()
    (foreign / ".metadata").write_text("another program's")
    (tmp_path / "iter_best.tmp").mkdir()
    with pytest.raises(CheckpointError, match="already exists and is not a checkpoint of this program: move it away"):
        save(tmp_path, *build())
    assert (foreign / ".metadata").exists()
    assert (tmp_path / "iter_best.tmp").exists()
    assert checkpoint.latest(tmp_path) is None


def test_little_waits_for_its_checksum_while_a_box_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK", 1 << 17)
    written, summed = 0, 0
    ahead: list[int] = []

    def slow(data: bytes, before: int) -> int:
        nonlocal summed
        time.sleep(0.002)
        summed += 1
        return zlib.crc32(data, before)

    class Disk:
        def write(self, data: bytes | memoryview) -> int:
            nonlocal written
            written += len(data) > 0
            ahead.append(written - summed)
            return len(data)

    monkeypatch.setattr(shard_file, "zlib", SimpleNamespace(crc32=slow))
    values = torch.randn(20 << 15)
    part = TensorBox("model/word", tuple(values.shape), values.dtype, Box.whole(tuple(values.shape)))
    (checksums,) = shard_file.write(Disk(), [(ByteRange(b"", 0, part.size, lambda _: b""), values)])
    assert checksums[-1] == zlib.crc32(shard_file.bytes_of(values))
    assert max(ahead) <= 2
