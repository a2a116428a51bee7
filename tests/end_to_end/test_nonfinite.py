"""A step that is not finite reports the origin, and the report does not change the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, Ended, assert_same_checkpoint, ended, metrics, words
from tests.harness.job import Job

# An entry script: pretrain_gpt.py with a fault on one rank for some samples.
SPOILED = """
import os, runpy, sys

from megalite.model.attention import Attention
from megalite.model.gpt import GPT

begin, attend, network = Attention.__init__, Attention.forward, GPT.forward
first, last = map(int, os.environ["SAMPLES"].split())
rank, where = os.environ["RANK"], os.environ["WHERE"]

def spoil(output, key, own=True):
    amiss = own and rank == os.environ["ON_RANK"] and first <= key.samples[0] <= last
    return output + float("nan") if amiss else output

def make(self, *given, layer=0, **options):
    begin(self, *given, layer=layer, **options)
    self.layer = layer

def attention(self, hidden, context):
    own = where == "attention" and self.layer == 1
    return spoil(attend(self, hidden, context), context.key, own)

def loss(self, inputs, micro_batch):
    output = network(self, inputs, micro_batch)
    spoiled = {name: spoil(term, micro_batch.key, where == "loss") for name, term in output.terms.items()}
    return output._replace(terms=spoiled)

Attention.__init__, Attention.forward, GPT.forward = make, attention, loss
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

SpoiledRun = Callable[..., Ended]


@pytest.fixture
def run_spoiled(spawn: Callable[..., Job], tmp_path: Path) -> SpoiledRun:
    """Train with a fault: `run_spoiled(*flags, samples="8 11", on_rank=1, where="attention", expected=0)`."""
    script = tmp_path / "spoiled.py"
    script.write_text(SPOILED)

    def run(
        *flags: Any, samples: str, on_rank: int = 1, where: str = "attention", world_size: int = 2, expected: int = 0
    ) -> Ended:
        environment = {"SAMPLES": samples, "ON_RANK": str(on_rank), "WHERE": where}
        return ended(spawn([script, PRETRAIN, *MOCK, *GPT2, *flags], world_size, **environment), expected, timeout=90)

    return run


def test_a_skipped_step_tells_and_the_run_goes_on_as_if_it_had_not(run_spoiled: SpoiledRun, tmp_path: Path) -> None:
    """Sample 10 begins the second micro-batch of the third step."""
    flags = words("--train-iters 5 --log-num-zeros-in-grad --tp 2 --sequence-parallel")
    told = run_spoiled(*flags, "--save", tmp_path / "told", samples="10 10")
    (line,) = [line for line in told.stdout.splitlines() if "WARNING" in line]
    assert line.startswith("WARNING: step 3 was skipped, since its gradient is not finite. It was run once more")
    assert "NaN came first on rank 1 (" in line
    assert "in micro-batch 1 (samples 10 to 11), forward, in the output of layer 1, attention; " in line
    assert line.endswith("Of the step's 2 micro-batches 1 are affected")
    assert [step["skipped"] for step in metrics(tmp_path / "told")] == [False, False, True, False, False]
    silent = run_spoiled(*flags, "--save", tmp_path / "silent", "--rerun-mode", "disabled", samples="10 10")
    assert "WARNING" not in silent.stdout
    assert metrics(tmp_path / "silent") == metrics(tmp_path / "told")
    assert_same_checkpoint(tmp_path / "told" / "iter_0000005", tmp_path / "silent" / "iter_0000005")


@pytest.mark.wide
def test_a_run_that_has_diverged_tells_where_it_last_did(run_spoiled: SpoiledRun) -> None:
    """This holds in fp16 too, where a dynamic loss scale could shrink for ever: the unscaled loss is not finite."""
    flags = words(
        "--train-iters 20 --fp16 --initial-loss-scale 256 --data-parallel-sharding-strategy optim_grads_params"
    )
    end = run_spoiled(*flags, samples="4 1000", on_rank=0, expected=93)
    assert end.stdout.count("WARNING: step 2 was skipped") == end.stdout.count("WARNING") == 1
    assert "in the last 10 steps (now step 11): the run has diverged." in end.stderr
    last = end.stderr.partition("The last of them: ")[2]
    assert last.startswith("step 11 was skipped, since its gradient is not finite")
    assert "NaN came first on rank 0 (" in last
    assert "Of the step's 2 micro-batches 1 are affected" in last


@pytest.mark.wide
def test_the_search_for_a_loss_scale_is_not_looked_into(run_spoiled: SpoiledRun, tmp_path: Path) -> None:
    flags = words(f"--train-iters 12 --fp16 --initial-loss-scale {2.0**24} --hysteresis 1")
    end = run_spoiled(*flags, "--save", tmp_path / "run", samples="-2 -1", world_size=1)
    assert any(step["skipped"] for step in metrics(tmp_path / "run"))
    assert "WARNING" not in end.stdout


def test_a_loss_that_is_not_finite_on_one_rank_alone_is_every_ranks(run_spoiled: SpoiledRun) -> None:
    """Each tensor-parallel rank computes the loss; here in a step that is skipped while the scale is searched for."""
    flags = words(f"--train-iters 3 --fp16 --initial-loss-scale {2.0**24} --tp 2")
    end = run_spoiled(*flags, samples="0 0", where="loss")
    assert "WARNING: step 1 was skipped" in end.stdout
    assert "NaN came first on rank 1 (" in end.stdout
    assert "forward, in the sums of the loss; the output of the output layer and its loss was" in end.stdout
    assert end.stdout.count("WARNING") == 1
