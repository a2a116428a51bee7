"""Relations of the flags of products in few bits, what a start tells of them, and which GPUs have them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megalite.config.idle_flags import without_idle_flags
from megalite.config.low_precision import BLOCKS, LowPrecisionConfig
from megalite.config.model import ModelConfig
from megalite.config.validate_low_precision import low_precision_notes
from megalite.errors import ConfigurationError
from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.rounded_products import UNROUNDED, Rounding, Roundings
from megalite.tasks.summary import precision_line
from megalite.training.builder import roundings
from megalite.training.kernels import require_recipe, require_whole_units
from megalite_kernels.recipes import recipe
from tests.unit.test_config_validate import config_of, problems

FP8, FP4 = "--fp8-format e4m3 ", "--fp4-format e2m1 "
WIDE = "--hidden-size 96 --kv-channels 16 --ffn-hidden-size 384 "  # with 12 heads
EXPERTS = "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax "
REFUSED = {
    "--fp8-wgrad": "--fp8-wgrad needs --fp8-format",
    "--fp8-recipe mxfp8": "--fp8-recipe needs --fp8-format",
    FP4 + "--fp8-wgrad": "--fp8-wgrad needs --fp8-format in place of --fp4-format",
    FP8 + "--num-layers-at-end-in-bf16 2": "--num-layers-at-end-in-bf16 needs --first-last-layers-bf16",
    FP8 + "--first-last-layers-bf16 --num-layers-at-end-in-bf16 3": "--first-last-layers-bf16 leaves none of",
    FP8 + FP4: "--fp8-format and --fp4-format are two ways to multiply: choose one",
    "--fp8-format hybrid --fp8-recipe mxfp8": "--fp8-format hybrid with --fp8-recipe mxfp8: training diverges",
    FP8 + "--fp16": "--fp16 with --fp8-recipe blockwise: small gradients",
    "--fp8-param-gather": "--fp8-param-gather needs --fp8-format",
    FP8 + "--fp8-param-gather --data-parallel-sharding-strategy optim": "--fp8-param-gather needs "
    "--data-parallel-sharding-strategy optim_grads_params (ZeRO 3), not ZeRO 1",
    FP8 + "--fp8-recipe mxfp8 --fp8-param-gather": "--fp8-param-gather with --fp8-recipe mxfp8: its two products",
    FP8 + "--fp8-param-gather --use-dora --lora-rank 4": "--fp8-param-gather with --use-dora",
    FP8
    + "--fp8-recipe tensorwise --mlp-chunks-for-training 2": "--fp8-recipe tensorwise with --mlp-chunks-for-training",
    FP8
    + "--fp8-wgrad --mlp-chunks-for-training 3": "--fp8-wgrad with --mlp-chunks-for-training 3: each part would have",
}
OF_RANKS = {
    WIDE + FP4 + "--tp 2 --ffn-hidden-size 400": "--fp4-format e2m1 with --tensor-model-parallel-size 2: "
    "--ffn-hidden-size 400, 400 channels, are no blocks of 16 on each rank: the next width is 416",
    WIDE + FP8 + "--tp 2": "--fp8-recipe blockwise with --tensor-model-parallel-size 2: --num-attention-heads 12 x "
    "--kv-channels 16, 192 channels, are no blocks of 128 on each rank: the next width is 256",
    WIDE + FP4 + "--tp 2 --group-query-attention --num-query-groups 1": "--fp4-format e2m1 with "
    "--tensor-model-parallel-size 2: ranks that share one of --num-query-groups 1 would each round a part of its "
    "gradient: give a number of ranks that divides 1",
    WIDE + FP4 + EXPERTS + "--tp 2 --sequence-parallel --moe-ffn-hidden-size 40": "--fp4-format e2m1 with "
    "--expert-tensor-parallel-size 2: --moe-ffn-hidden-size 40, 40 channels, are no blocks of 16 on each rank: the "
    "next width is 64",
}


def test_blocks_of_the_flags_are_those_of_the_kernels() -> None:
    """Configuration imports no torch, so it names them again."""
    assert {name: recipe(name).block or 1 for name in BLOCKS} == BLOCKS


@pytest.mark.parametrize("flags", REFUSED)
def test_what_does_not_go_together_is_refused(flags: str) -> None:
    assert any(line.startswith(REFUSED[flags]) for line in problems(flags))


@pytest.mark.parametrize("flags", OF_RANKS)
def test_ranks_have_whole_blocks_and_groups(flags: str) -> None:
    assert OF_RANKS[flags] in problems(flags, world_size=2)


def test_layers_at_the_ends_are_left_out() -> None:
    assert without_idle_flags(config_of("--first-last-layers-bf16"))[0] == config_of("")
    assert config_of("").low_precision == LowPrecisionConfig()
    assert roundings(config_of("")) is UNROUNDED
    every = roundings(config_of("--fp8-format hybrid --fp8-recipe tensorwise"))
    assert [each is not None for each in every.of_layers] == [True] * 4
    assert every.of_layers[0] == every.of_depths
    assert every.of_layers[0].recipe.backward == torch.float8_e5m2  # type: ignore[union-attr]
    assert not every.of_layers[0].stores_activations  # type: ignore[union-attr]
    stored = roundings(config_of(FP8 + "--activation-func-fp8-input-store")).of_layers[0]
    assert stored == Rounding(recipe("blockwise"), stores_activations=True)
    some = roundings(config_of(FP4 + "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2"))
    assert [each is not None for each in some.of_layers] == [False, False, True, False]
    assert some.of_depths is None  # as Megatron-LM leaves them in bf16


def test_a_start_tells_what_is_not_rounded() -> None:
    default, note = low_precision_notes(config_of(FP8))
    assert default.startswith("note: --fp8-recipe blockwise, since no recipe is given")
    assert note.endswith("of gradients that are not, which Megatron-LM rounds, too: --fp8-wgrad does it")
    (note,) = low_precision_notes(config_of(FP8 + "--fp8-wgrad --fp8-recipe blockwise"))
    assert "run along tokens" in note
    for layout, run in {"--cp 2": 16, "--tp 2 --sequence-parallel": 32, "--cp 2 --tp 4 --sequence-parallel": 8}.items():
        (note,) = low_precision_notes(config_of(f"{FP8}--fp8-wgrad --fp8-recipe mxfp8 --seq-length 64 {layout}"))
        assert f" {run} consecutive tokens of a sample on a rank x --micro-batch-size 2 = {2 * run}, " in note
        assert ("and is one, as on each layout" in note) == (2 * run % 32 == 0)
    assert not low_precision_notes(config_of(FP8 + "--fp8-wgrad --fp8-recipe tensorwise"))
    assert len(low_precision_notes(config_of(FP8 + "--fp8-recipe tensorwise --num-experts 2"))) == 2
    assert len(low_precision_notes(config_of(FP4 + "--num-experts 2"))) == 1


def test_a_start_tells_what_is_rounded() -> None:
    assert precision_line(config_of("--bf16")) == "bfloat16"
    line = precision_line(config_of("--fp8-format hybrid --fp8-recipe tensorwise --bf16"))
    assert line == "bfloat16, products in tensorwise hybrid (MFU: of bfloat16's peak)"
    some = precision_line(config_of(f"{FP8}--fp8-wgrad --first-last-layers-bf16"))
    assert "products in blockwise e4m3 in 2 of 4 layers, those of weight gradients, too" in some


def test_what_a_gpu_lacks_is_refused_in_one_line() -> None:
    gpu = torch.device("cuda:0")
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.version.cuda", "12.9"),
    ):
        require_recipe(config_of(FP8 + "--fp8-wgrad"), gpu)
        for flags, words in {
            FP4: "--fp4-format e2m1: nvfp4 runs on CPUs alone",
            FP8 + "--fp8-recipe mxfp8": "--fp8-recipe mxfp8: mxfp8 runs on CPUs alone",
            FP8 + "--fp64": "--fp8-recipe blockwise with --fp64 on a GPU",
        }.items():
            with pytest.raises(ConfigurationError, match=words) as raised:
                require_recipe(config_of(flags), gpu)
            assert len(str(raised.value).splitlines()) == 1
            require_recipe(config_of(flags), torch.device("cpu"))
            require_recipe(config_of(flags + " --kernels reference"), gpu)
    with mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)):
        require_recipe(config_of(""), gpu)
        with pytest.raises(ConfigurationError, match="--fp8-recipe blockwise: blockwise needs a GPU with fp8"):
            require_recipe(config_of(FP8), gpu)


def test_a_gpu_multiplies_whole_units_by_one_scale() -> None:
    """Blocks have no such limit."""
    each = Rounding(recipe("tensorwise"))
    model = ModelConfig(
        num_layers=1, hidden_size=128, num_attention_heads=4, ffn_hidden_size=200, vocab_size=8,
        max_position_embeddings=4,
    )  # fmt: skip
    stage = GPT(model, ParallelMesh(device=torch.device("meta")), roundings=Roundings((each,)))
    gpu, flags = torch.device("cuda:0"), FP8 + "--fp8-recipe tensorwise "
    with pytest.raises(ConfigurationError, match=r"a rank has 200 x 128 of layers\.0\.mlp\.up, and a GPU"):
        require_whole_units(config_of(flags), [stage], gpu)
    require_whole_units(config_of(flags), [stage], torch.device("cpu"))
    require_whole_units(config_of(flags + "--kernels reference"), [stage], gpu)
    require_whole_units(config_of(FP8), [stage], gpu)
    require_whole_units(config_of(""), [stage], gpu)
