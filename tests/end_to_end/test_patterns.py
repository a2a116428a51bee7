"""Patterns of layers from the command line: what a checkpoint says of them, and what flags say otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, Run, ended, losses, words
from tests.harness.job import Job
from tests.harness.tool import run_tool
from tests.harness.wide import wide_except

FLAGS = [*MOCK, *GPT2[: GPT2.index("--num-layers")], *GPT2[GPT2.index("--num-layers") + 2 :]]
"""Flags of a run without those of its layers."""


@pytest.mark.wide
def test_a_network_is_taken_from_a_checkpoint_without_its_stages(run: Run, tmp_path: Path) -> None:
    flags = [*FLAGS, *words("--train-iters 2 --save-interval 2")]
    run(*flags, "--hybrid-layer-pattern", "*-|*-", "--pp", 2, "--save", tmp_path / "a", world_size=2)
    more = [
        *MOCK,
        *words(
            "--train-iters 4 --use-checkpoint-args --lr 1e-3 --seq-length 16 --micro-batch-size 2 --global-batch-size 4"
        ),
        "--load",
        tmp_path / "a",
    ]
    as_it_was = run(*more, "--save", tmp_path / "b").stdout
    assert "4 layers *-*-" in as_it_was
    assert "2 layers, hidden" in run(*more, "--num-layers", 2, "--save", tmp_path / "c").stdout
    assert losses(tmp_path / "b") == losses(tmp_path / "c")


RECURRENT = words(
    "--hybrid-layer-pattern MG*- --mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
)


def test_a_run_with_recurrent_layers_resumes_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    """In bf16, with decays in fp32, sharded over two ranks."""
    network = [*GPT2[: GPT2.index("--num-layers")], *GPT2[GPT2.index("--num-layers") + 2 :], *RECURRENT]
    flags = [*MOCK, *network, *words("--bf16 --use-distributed-optimizer --save-interval 2")]
    run(*flags, "--train-iters", 4, "--save", tmp_path / "whole", world_size=2)
    stopping = words("--train-iters 4 --exit-interval 2")
    run(*flags, *stopping, "--save", tmp_path / "parts", world_size=2, expected=85)
    run(*flags, *words("--train-iters 4 --resume auto"), "--save", tmp_path / "parts", world_size=2)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "parts")) == 4


@pytest.mark.parametrize("program", wide_except(["pretrain_hybrid.py", "pretrain_mamba.py"], ["pretrain_hybrid.py"]))
def test_megatrons_programs_for_patterns_train_as_the_gpts_does(
    program: str, spawn: Callable[..., Job], run: Run, tmp_path: Path
) -> None:
    flags = [*FLAGS, *words("--train-iters 2 --save-interval 2 --hybrid-layer-pattern *-*-")]
    spec = words("--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec")
    script = PRETRAIN.with_name(program)
    ended(spawn([script, *flags, *spec, "--save", tmp_path / "hybrid"], 1))
    run(*flags, "--save", tmp_path / "gpt")
    assert losses(tmp_path / "hybrid") == losses(tmp_path / "gpt")
    shown = run_tool("inspect_checkpoint", "--load", tmp_path / "hybrid").stdout
    assert re.search(r"^layers +\*-\*-$", shown, re.MULTILINE)
    wrong = ended(spawn([script, *flags], 1), 64)
    assert "missing: --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec" in wrong.stderr
