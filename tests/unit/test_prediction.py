"""Multi-token prediction: its flags, its labels, its costs, and what knows nothing of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.checkpoint.compatibility import check_same_function
from megalite.config import ModelConfig
from megalite.config.layer_costs import least_parameters
from megalite.config.model import as_gpt
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import layout_lines, stage_layers
from megalite.config.prediction import without_depths
from megalite.config.validate import resolve
from megalite.config.validate_model import model_problems
from megalite.conversion.opened import tensors_of_depths, tensors_of_training
from megalite.errors import CheckpointError, ConfigurationError
from megalite.model.gpt import GPT
from megalite.model.recompute import Recompute
from megalite.parallel.mesh import UnconnectedMesh
from megalite.tasks.flops import flops_per_token
from megalite.training.batches import further_tokens

RUN = (
    "--hidden-size 16 --num-attention-heads 4 --seq-length 8 --position-embedding-type rope --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 30 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 "
    "--train-iters 2"
)
MODEL = ModelConfig(2, 16, 4, position_embedding_type="rope", vocab_size=32, mtp_num_layers=2)


def model_of(flags: str) -> ModelConfig:
    return parse_arguments([*RUN.split(), *flags.split()]).config.model


def test_parts_of_a_pattern_are_its_depths() -> None:
    model = model_of("--hybrid-layer-pattern *-M|-/*-/*- --pp 2")
    assert (model.hybrid_layer_pattern, model.mtp_hybrid_override_pattern, model.mtp_num_layers) == ("*-M-", "*-", 2)
    assert model.num_layers == 4
    assert model == model_of("--hybrid-layer-pattern *-M|- --mtp-hybrid-override-pattern *- --mtp-num-layers 2 --pp 2")
    assert not model_of("--hybrid-layer-pattern *-//").depths


def test_the_number_of_parts_wins() -> None:
    for count in ("3", "0"):
        parsed = parse_arguments([*RUN.split(), "--hybrid-layer-pattern", "*-/*", "--mtp-num-layers", count])
        assert parsed.config.model.depths == 1
        assert any(note.startswith("--mtp-num-layers: changes nothing") for note in parsed.notes)
    parsed = parse_arguments([*RUN.split(), "--hybrid-layer-pattern", "*-/*", "--mtp-hybrid-override-pattern", "-"])
    assert parsed.config.model.mtp_hybrid_override_pattern == "*"
    assert any(note.startswith("--mtp-hybrid-override-pattern: changes nothing") for note in parsed.notes)


def test_no_depths_are_0_and_an_empty_part_of_a_pattern() -> None:
    flags = "--mtp-loss-scaling-factor 0.3 --mtp-use-repeated-layer"
    assert model_of(f"--num-layers 2 --mtp-num-layers 0 {flags}") == model_of("--num-layers 2")
    by_field = model_of("--hybrid-layer-pattern *-/ --mtp-hybrid-override-pattern - --mtp-num-layers 2")
    assert by_field == model_of("--hybrid-layer-pattern *-/-/-")


@pytest.mark.parametrize(
    "flags",
    [
        "--hybrid-layer-pattern *-/*E --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid",
        "--hybrid-layer-pattern *-/M --mamba-head-dim 8 --mamba-num-groups 1 --mamba-state-dim 8",
        "--hybrid-layer-pattern M-/+- --kv-lora-rank 8 --qk-layernorm --mamba-head-dim 8 --mamba-num-groups 1",
        "--hybrid-layer-pattern M-/*- --group-query-attention --num-query-groups 2 --mamba-num-groups 1 "
        "--mamba-head-dim 8",
    ],
)
def test_a_network_without_depths_lacks_the_sizes_of_layers_that_they_alone_had(flags: str) -> None:
    config = parse_arguments([*RUN.split(), *flags.split()]).config
    resolve(config, 1)
    alone = without_depths(config.model)
    assert not alone.depths
    assert not model_problems(alone)


def test_a_depth_has_the_layers_that_it_names_with_the_windows_of_the_last_of_their_kind() -> None:
    windows = {"window_size": "3,0", "window_attn_skip_freq": "[0,0,1]"}
    model = replace(MODEL, num_layers=3, hybrid_layer_pattern="*-*", mtp_hybrid_override_pattern="-*", **windows)
    assert [layer.keys_before for layer in model.depth_layers] == [None, 3]
    assert MODEL.depth_layers == MODEL.layers[-1:]
    assert MODEL.names[-1] == ("mtp.1.layers.0", "mtp.1.layers.0")
    assert MODEL.numbers[-1] == (3, 3)  # no two layers drop the same
    assert replace(MODEL, mtp_use_repeated_layer=True).all_layers == MODEL.all_layers[:-1]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--num-layers 2 --mtp-num-layers 8", "--mtp-num-layers 8 is not below --seq-length 8: no token has such"),
        ("--num-layers 2 --mtp-num-layers -1", "--mtp-num-layers -1: must be at least 0"),
        (
            "--num-layers 2 --pp 2 --pipeline-model-parallel-layout Et|tmL",
            "--pipeline-model-parallel-layout 'Et|tmL': m is a depth, and needs --mtp-num-layers",
        ),
        (
            "--hybrid-layer-pattern *-/*E --num-experts 4 --moe-router-topk 2 --fine-grained-activation-offloading "
            "--offload-modules moe_act",
            "--offload-modules moe_act: --hybrid-layer-pattern '*-' has no layer with that: leave it out",
        ),
        ("--num-layers 2 --mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor needs --mtp-num-layers, or / in"),
        ("--num-layers 2 --mtp-detach-heads", "--mtp-detach-heads needs --mtp-num-layers, or / in"),
        ("--num-layers 2 --mtp-standalone", "--mtp-standalone needs --mtp-num-layers, or / in"),
        ("--num-layers 2 --mtp-num-layers 1 --mtp-standalone", "--mtp-standalone needs --pipeline-model-parallel-size"),
        (
            "--num-layers 2 --pp 2 --mtp-num-layers 1 --mtp-standalone --decoder-first-pipeline-num-layers 1",
            "--mtp-standalone leaves the other stages equal parts of the layers: leave --decoder-first-pipeline-num",
        ),
        (
            "--num-layers 3 --pp 3 --mtp-num-layers 1 --mtp-standalone",
            "--num-layers 3 cannot be divided evenly among 2 stages, all but that of --mtp-standalone",
        ),
        (
            "--num-layers 2 --mtp-num-layers 1 --position-embedding-type learned_absolute --max-position-embeddings 8",
            "--mtp-num-layers 1 needs --position-embedding-type rope, yarn or none: learned positions are added to",
        ),
        (
            "--num-layers 2 --mtp-num-layers 1 --mtp-hybrid-override-pattern *",
            "--mtp-hybrid-override-pattern '*' needs",
        ),
        ("--hybrid-layer-pattern *- --mtp-num-layers 1", "--mtp-num-layers 1: give the letters of a depth in --hybrid"),
        ("--hybrid-layer-pattern *-/*/-", "--hybrid-layer-pattern '*-/*/-' has the depths '*' and '-': give all of"),
        ("--hybrid-layer-pattern *-/*|-", "--hybrid-layer-pattern '*-/*|-': | is not for depths, which are on the"),
        (
            "--hybrid-layer-pattern *- --mtp-num-layers 1 --mtp-hybrid-override-pattern *|-",
            "--mtp-hybrid-override-pattern '*|-' has |: give the letters of one depth, which all depths have",
        ),
        ("--hybrid-layer-pattern *- --mtp-num-layers 1 --mtp-hybrid-override-pattern -/-", "pattern '-/-' has /: give"),
        ("--hybrid-layer-pattern *-/x", "depth of --hybrid-layer-pattern, behind /, 'x': 'x', character 1, is unknown"),
        ("--hybrid-layer-pattern /*-", "--hybrid-layer-pattern '' has no layers: give one letter for each"),
        ("--hybrid-layer-pattern *-/E", "--hybrid-layer-pattern '*-' has layers with experts (E): give --num-experts"),
        ("--num-layers 2 --mtp-num-layers 2 --pp 2 --pipeline-model-parallel-layout Ett|mL", "m is a depth of --mtp"),
        ("--num-layers 2 --mtp-num-layers 1 --pp 2 --pipeline-model-parallel-layout Ettm|L", "m is a depth of --mtp"),
        ("--num-layers 2 --mtp-hsm", "--mtp-hsm draws the input of depths at random from earlier ones, which"),
    ],
)
def test_what_contradicts_it_is_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        config = parse_arguments([*RUN.split(), *flags.split()]).config
        resolve(config, config.parallel.ranks_needed)
    assert any(problem in line for line in str(raised.value).splitlines()), raised.value


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--pp 2", [2, 2]),
        ("--pp 3 --mtp-standalone", [2, 2, 0]),
        ("--pp 5 --mtp-standalone", [1, 1, 1, 1, 0]),
        ("--pp 2 --pipeline-model-parallel-layout Ett|ttmmL", [2, 2]),
        ("--pp 2 --pipeline-model-parallel-layout E(t)*4|m*2L", [4, 0]),
        ("--pp 2 --pipeline-model-parallel-layout Ettt|tL", [3, 1]),
    ],
)
def test_depths_are_on_the_last_stage(flags: str, layers: list[int]) -> None:
    config = parse_arguments([*RUN.split(), "--num-layers", "4", "--mtp-num-layers", "2", *flags.split()]).config
    config = resolve(config, config.parallel.ranks_needed)
    assert [stage.layers for stage in stage_layers(config.model, config.parallel)] == layers
    assert "and 2 further depths on the last one" in layout_lines(config.model, config.parallel)[0]


def test_labels_are_those_behind_each_token() -> None:
    text = torch.tensor([[1, 2, 3, 4, 5, 6]])
    tokens, labels, mask = text[:, :-1], text[:, 1:], torch.tensor([[0.0, 1.0, 0.5, 1.0, 1.0]])
    inputs, of_depths, masks = further_tokens(tokens, labels, mask, None, 3)
    assert inputs[:, 0].tolist() == [[2, 3, 4, 5, 6], [3, 4, 5, 6, 0], [4, 5, 6, 0, 0]]
    assert of_depths[:, 0].tolist() == [[3, 4, 5, 6, 0], [4, 5, 6, 0, 0], [5, 6, 0, 0, 0]]
    assert masks[:, 0].tolist() == [[1.0, 0.5, 1.0, 1.0, 0.0], [0.5, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0]]


def test_no_depth_predicts_another_document() -> None:
    """The document of the last label is not known."""
    text, first = torch.arange(1, 8)[None], torch.tensor([[0, 0, 0, 3, 3, 3]])
    _, labels, masks = further_tokens(text[:, :-1], text[:, 1:], torch.ones(1, 6), first, 2)
    assert masks[:, 0].tolist() == [[1.0, 0, 0, 1.0, 0, 0], [0.0] * 6]
    assert labels[0, 0, [0, 3]].tolist() == [3, 6]


def test_flops_are_those_of_the_layers_the_projections_and_the_logits() -> None:
    def flops(**changes: Any) -> float:
        return flops_per_token(replace(MODEL, mtp_num_layers=None, **changes), 32, 8)

    of_layer = flops(num_layers=3) - flops()
    of_depth = of_layer + 3 * 2 * (2 * 16 * 16 + 16 * 32)
    for repeated in (False, True):
        assert flops_per_token(replace(MODEL, mtp_use_repeated_layer=repeated), 32, 8) == flops() + 2 * of_depth


@pytest.mark.parametrize("repeated", [False, True])
def test_parameters_are_counted(repeated: bool) -> None:
    model = replace(MODEL, mtp_use_repeated_layer=repeated, add_bias_linear=False)
    matrices = [t for t in tensors_of_training(model).values() if len(t.shape) > 1]
    assert least_parameters(model) == sum(torch.Size(tensor.shape).numel() for tensor in matrices)
    names = tensors_of_depths(model)
    assert len(names) == (1 if repeated else 2) * (3 * 2 + 1 + 2 * 2 + 3 + 2)
    assert {name.split(".")[1] for name in names} == ({"0"} if repeated else {"0", "1"})


def test_collectives_of_depths_are_declared() -> None:
    model = replace(MODEL, num_experts=2, moe_router_topk=1, moe_token_dispatcher_type="alltoall")
    mesh = UnconnectedMesh(rank=0, world_size=2, expert_parallel_size=2, device=torch.device("meta"))
    for options in ({}, {"method": "uniform"}, {"moe": True}):
        plain = GPT(replace(model, num_layers=4, mtp_num_layers=None), mesh, recompute=Recompute(**options))
        for repeated in (False, True):
            with_depths = replace(model, mtp_use_repeated_layer=repeated)
            found = GPT(with_depths, mesh, recompute=Recompute(**options))
            for backward in (False, True):
                assert found.inside(backward=backward) == plain.inside(backward=backward) != []


def test_a_network_is_another_with_other_depths() -> None:
    check_same_function("it", MODEL, replace(MODEL, mtp_loss_scaling_factor=0.3, mtp_detach_heads=True))
    for other in (without_depths(MODEL), replace(MODEL, mtp_num_layers=1), replace(MODEL, mtp_use_repeated_layer=True)):
        with pytest.raises(CheckpointError, match=r"--finetune leaves out the depths"):
            check_same_function("it", other, MODEL)


def test_a_pattern_of_halves_is_a_gpt_with_depths() -> None:
    halves = replace(MODEL, num_layers=4, hybrid_layer_pattern="*-*-", mtp_hybrid_override_pattern="*-")
    assert as_gpt(halves) == MODEL
    check_same_function("it", halves, MODEL)
    assert as_gpt(replace(halves, mtp_hybrid_override_pattern="-*")).hybrid_layer_pattern is not None
    assert tensors_of_training(halves).keys() == tensors_of_training(MODEL).keys()
