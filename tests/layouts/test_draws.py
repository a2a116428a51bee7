"""Draws are valid and the same again, mistakes in them are accused, and programs that are missing are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megalite.extras.verify.judgement import Judgement
from megalite.extras.verify.trace import Entry
from megalite.extras.verify.verdict import Verdict
from museum.plain.network import Stage
from museum.plain.ranks import Ranks
from tests.layouts.__main__ import main
from tests.layouts.campaign import as_lines, attempt, from_lines, table
from tests.layouts.draws import PROGRAMS, Draw, draw, draws, is_valid
from tests.layouts.known import known
from tests.layouts.programs import Programs, plain

_OF_ANY_NETWORK = {
    "num-attention-heads",
    "seq-length",
    "max-position-embeddings",
    "mock-data",
    "tokenizer-type",
    "vocab-size",
    "train-iters",
    "eval-iters",
    "lr",
    "lr-decay-style",
    "init-method-std",
}


@pytest.mark.wide_except("megalite")
@pytest.mark.parametrize("program", PROGRAMS)
def test_draws_are_valid_and_a_seed_gives_them_again(program: str) -> None:
    found = list(draws(program, "1", 40))
    assert all(is_valid(program, each.flags, each.ranks) for each in found)
    assert found == list(draws(program, "1", 40))
    assert draw(program, "1", 17) == found[17]
    assert len({each.text for each in found}) > 30
    assert len({each.text for each in found} & {each.text for each in draws(program, "2", 40)}) < 10
    assert {each.ranks for each in found} == ({1} if program == "transformers" else {1, 2, 4})
    assert {"bf16" in each.text or "bfloat16" in each.text for each in found} == {True, False}


@pytest.mark.wide_except("megalite")
@pytest.mark.parametrize("program", ["megatron", "megalite"])
def test_draws_have_each_axis_and_many_features(program: str) -> None:
    texts = [each.text for each in draws(program, "1", 120)]
    for flag in (
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "context-parallel-size",
        "expert-model-parallel-size",
        "sequence-parallel",
        "num-layers-per-virtual-pipeline-stage",
        "use-distributed-optimizer",
        "multi-latent-attention",
        "moe-shared-expert-intermediate-size",
        "softmax-type",
    ):
        assert any(f"--{flag}" in text for text in texts), flag


def nothing(stage: Stage, ranks: Ranks) -> None:
    """Leave gradients as they are."""


class Wrong(Programs):
    """Programs that leave out the sum of gradients of norms over sequence-parallel ranks."""

    def verdict(self, draw: Draw, folder: Path) -> Verdict:
        return plain(draw, folder, {"sum_norm_gradients": nothing})


def with_sequence_parallelism() -> Draw:
    return next(each for each in draws("plain", "1", 200) if each.flags["sp"] and each.ranks == 2)


@pytest.mark.wide
def test_a_mistake_in_a_drawn_layout_is_accused_and_kept(tmp_path: Path) -> None:
    drawn = with_sequence_parallelism()
    right = attempt(drawn, Programs(), tmp_path)
    assert right.found == "right", right.line
    assert not (tmp_path / drawn.name).exists()
    wrong = attempt(drawn, Wrong(), tmp_path)
    assert wrong.found == "accused"
    assert "the sum over sequence-parallel ranks (axis tp) is missing" in wrong.line
    kept = tmp_path / drawn.name
    assert (kept / "REPRODUCE.txt").read_text() == (
        f"python -m tests.layouts --seed 1 --draw {drawn.number} --program plain\n"
    )
    assert json.loads((kept / "verdict.json").read_text())["verdict"] == "wrong"
    assert from_lines(as_lines([right, wrong])) == [right, wrong]
    assert table([right, wrong]).splitlines()[1].split()[:3] == ["plain", right.precision, "2"]


@pytest.mark.wide
def test_a_tied_network_runs_on_four_stages(tmp_path: Path) -> None:
    """The second of them once waited for a sum over the first and the last one."""
    drawn = draw("plain", "49", 22)
    flags = drawn.flags | {"layers": 4, "pp": 4, "tied": True, "batch": 2, "micro_batch": 1}
    one_axis = {"tp": 1, "cp": 1, "dp": 1, "sp": False}
    outcome = attempt(Draw("plain", "49", 22, 4, flags | one_axis), Programs(), tmp_path)
    assert outcome.found == "right", outcome.line


@pytest.mark.wide
def test_a_pattern_of_halves_of_layers_is_judged_from_its_checkpoint(tmp_path: Path) -> None:
    """The checkpoint is that of whole layers: the function is the same, and the modules are others."""
    flags = {name: value for name, value in draw("megalite", "1", 0).flags.items() if name in _OF_ANY_NETWORK}
    flags |= {"num-layers": 4, "hidden-size": 32, "hybrid-layer-pattern": "*-*-", "position-embedding-type": "rope"}
    flags |= {"micro-batch-size": 1, "global-batch-size": 2}
    programs = Programs()
    try:
        outcome = attempt(Draw("megalite", "1", 0, 1, flags), programs, tmp_path)
    finally:
        programs.pools.close()
    assert outcome.found == "right", outcome.line


def accused(name: str, role: str) -> Judgement:
    entry = Entry(0, name, role, (2,), "", lambda: pytest.fail("it is not read"))  # type: ignore[arg-type]
    return Judgement(entry, None, None, 0, 1.0, 1e-6, 1.0, 1.0)


def test_a_known_difference_explains_no_others() -> None:
    of = {"multi-latent-attention": True, "tensor-model-parallel-size": 2}
    latents, others = Draw("megatron", "1", 0, 2, of), Draw("megatron", "1", 0, 2, {"tensor-model-parallel-size": 2})
    gradient = accused("decoder.layers.1.self_attention.linear_kv_down_proj.weight", "main_gradient")
    output = accused("decoder.layers.1.mlp", "output")
    assert known(latents, Verdict([gradient], gradient)) is not None
    assert known(latents, Verdict([gradient, output], output)) is None
    assert known(others, Verdict([gradient], gradient)) is None


def test_a_program_that_is_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["layouts", "--program", "torchtitan", "--keep", str(tmp_path)])
    assert main() == 1  # nothing has run
    assert "NOT RUN: torchtitan: give --python" in capsys.readouterr().out
