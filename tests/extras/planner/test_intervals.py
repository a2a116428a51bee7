"""Intervals of predicted steps: by the class of the run, and the widest where nobody has measured such a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config.parse import parse_arguments
from megalite.extras.planner.cluster import find_cluster, find_stack
from megalite.extras.planner.intervals import Interval, interval

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --lr 1 "
    "--vocab-size 99 --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --train-iters 1"
)
HALF, EXPERTS = "--bf16", "--bf16 --num-experts 8"


def expected(gpu: str, flags: str, *, program: str = "bridge", low: str | None = None) -> Interval:
    """Return the interval of a step of a second. `low`: dtype of the products of layers."""
    stack = replace(find_stack(program), low_precision=low)
    return interval(1.0, parse_arguments(f"{RUN} {flags}".split()).config, find_cluster(gpu), stack)


def test_an_interval_is_that_of_the_class_of_the_run() -> None:
    dense, experts = expected("H100-SXM", HALF), expected("H100-SXM", EXPERTS)
    assert dense.unknown is None is experts.unknown
    assert 1 < dense.most < experts.most
    assert expected("A100-SXM-80GB", "--fp16") == dense
    assert expected("H100-SXM", HALF, low="float8") not in (dense, experts)


def test_a_program_that_nobody_has_measured_has_a_wider_interval() -> None:
    known, own = expected("H100-SXM", HALF), expected("H100-SXM", HALF, program="megalite")
    assert own.unknown is None
    assert own.most / own.least > known.most / known.least
    assert own.most * own.least > 1  # most programs take longer than the model says


@pytest.mark.parametrize(
    ("gpu", "flags", "low", "words"),
    [
        ("B200", HALF, None, "dense, 16 bits, on Blackwell"),
        ("A100-SXM-80GB", EXPERTS, None, "experts, 16 bits, on Ampere"),
        ("H100-SXM", "", None, "dense, float32, on Hopper"),
        ("B200", HALF, "float4", "dense, float4, on Blackwell"),
        ("MI300X", HALF, None, "dense, 16 bits, on CDNA 3"),
        ("cpu", HALF, None, "dense, 16 bits, on cpu"),
    ],
)
@pytest.mark.parametrize("program", ["bridge", "megalite"])
def test_a_class_that_nobody_has_measured_has_the_widest_interval(
    gpu: str, flags: str, low: str | None, words: str, program: str
) -> None:
    found = expected(gpu, flags, program=program, low=low)
    assert found.unknown == words
    known = [
        expected("H100-SXM", each, program=program, low=low) for each in (HALF, EXPERTS) for low in (None, "float8")
    ]
    assert found.most / found.least == pytest.approx(max(each.most / each.least for each in known))
