"""Options of context parallelism fit each other, the network and the ranks, or one line says what does."""

from __future__ import annotations

import pytest

from megalite.commands import generate
from megalite.config import parse_arguments, resolve
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import ConfigurationError
from megalite.parallel.context import AttentionWay
from megalite.training.builder import attention_ways
from tests.unit.test_config_validate import VALID, config_of, problems

SIZES = "--hierarchical-context-parallel-sizes"
INSTANCES = "--use-distributed-optimizer --num-distributed-optimizer-instances"
BOTH = f"--cp-comm-type a2a+p2p {SIZES}"
DOCUMENTS = "--cp-balance documents"


def notes(flags: str) -> tuple[str, ...]:
    return parse_arguments(f"{VALID} {flags}".split()).notes


def long(length: int) -> str:
    return f"--seq-length {length} --max-position-embeddings {length}"


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--cp 2", 2),
        ("--cp 2", 6),
        ("--cp 16", 16),
        ("--cp 4 --tp 2 --sequence-parallel --pp 2 --num-virtual-stages-per-pipeline-rank 2", 32),
        ("--cp 4 --tp 4 --sequence-parallel", 16),
        ("--cp 4 --tp 3", 12),
        ("--cp 2 --cp-comm-type all_gather", 2),
        ("--cp 2 --cp-comm-type p2p a2a all_gather allgather", 2),
        ("--cp 4 --tp 3 --cp-comm-type a2a", 12),
        ("--cp 4 --cp-comm-type a2a --group-query-attention --num-query-groups 3", 4),
        (f"--cp 4 {BOTH} 2 2", 4),
        (f"--cp 4 {BOTH} 4 1", 4),
        (f"--cp 8 --tp 6 {BOTH} 2 4 --cp-comm-type p2p a2a+p2p a2a+p2p p2p", 48),
        (f"--cp 2 {DOCUMENTS}", 2),
        (f"--cp 2 {DOCUMENTS} --cp-chunks-per-rank 4", 2),
        (f"--cp 2 {INSTANCES} 2", 4),
        ("--cp 2 --num-experts 8 --ep 4", 4),
    ],
)
def test_what_fits_is_taken(flags: str, world_size: int) -> None:
    resolve(config_of(flags), world_size)


def test_both_spellings_of_the_gather_are_one_way() -> None:
    one, other = (config_of(f"--cp 2 --cp-comm-type {way}").parallel for way in ("all_gather", "allgather"))
    assert attention_ways(one) == attention_ways(other) == (AttentionWay(head_ranks=1, gathers=True),)


def test_each_layer_has_its_way() -> None:
    parallel = config_of(f"--cp 4 {BOTH} 2 2 --cp-comm-type a2a p2p all_gather a2a+p2p").parallel
    ways = [(way.head_ranks, way.gathers) for way in attention_ways(parallel)]
    assert ways == [(4, False), (1, False), (1, True), (2, False)]


@pytest.mark.parametrize(
    ("flags", "world_size", "problem"),
    [
        ("--cp 2", 3, "3 ranks cannot be divided into groups of --context-parallel-size 2"),
        (
            "--tp 2 --cp 4 --pp 2",
            4,
            "4 ranks cannot be divided into groups of --tensor-model-parallel-size 2 x --context-parallel-size 4 x "
            "--pipeline-model-parallel-size 2",
        ),
        (
            "--cp 2 --global-batch-size 6",
            4,
            "--global-batch-size 6 is not a multiple of --micro-batch-size 2 x 2 data-parallel ranks",
        ),
        (
            f"--cp 2 {INSTANCES} 3",
            4,
            "--num-distributed-optimizer-instances 3 does not divide 4 data- and context-parallel ranks",
        ),
        (
            "--cp 3",
            3,
            "--seq-length 32 with --context-parallel-size 3: must be a multiple of 6, for 2 chunks x 3 ranks; near it: "
            "30 and 36",
        ),
        (
            "--cp 32",
            32,
            "--seq-length 32 with --context-parallel-size 32: must be a multiple of 64, for 2 chunks x 32 ranks; near "
            "it: 64",
        ),
        (
            f"--cp 4 --tp 2 --sequence-parallel {long(40)}",
            8,
            "--seq-length 40 with --context-parallel-size 4: must be a multiple of 16, for 2 chunks x 4 ranks x 2 "
            "tensor-parallel ranks; near it: 32 and 48",
        ),
        (
            f"--cp 2 {DOCUMENTS} --cp-chunks-per-rank 5",
            2,
            "--seq-length 32 with --context-parallel-size 2: must be a multiple of 10, for 5 chunks x 2 ranks; near "
            "it: 30 and 40",
        ),
        (
            "--cp 8 --cp-comm-type a2a",
            8,
            "--cp-comm-type a2a cannot divide the heads of a tensor-parallel rank (12) among 8 ranks: "
            "numbers of ranks that can are 1, 2, 3, 4, 6, 12; p2p and all_gather do not divide heads",
        ),
        (
            "--cp 4 --tp 2 --cp-comm-type p2p a2a p2p a2a",
            8,
            "--cp-comm-type a2a cannot divide the heads of a tensor-parallel rank (6) among 4 ranks: "
            "numbers of ranks that can are 1, 2, 3, 6; p2p and all_gather do not divide heads",
        ),
        (
            f"--cp 16 {BOTH} 8 2",
            16,
            "--cp-comm-type a2a+p2p cannot divide the heads of a tensor-parallel rank (12) among 8 ranks: "
            "numbers of ranks that can are 1, 2, 3, 4, 6, 12; p2p and all_gather do not divide heads",
        ),
        (
            f"--cp 4 {BOTH} 2 3",
            4,
            f"{SIZES} 2 3: must be two sizes whose product is --context-parallel-size 4: 1 4, 2 2, 4 1",
        ),
        (
            f"--cp 4 {BOTH} 4",
            4,
            f"{SIZES} 4: must be two sizes whose product is --context-parallel-size 4: 1 4, 2 2, 4 1",
        ),
        (
            "--cp 4 --cp-comm-type a2a+p2p",
            4,
            f"--cp-comm-type a2a+p2p needs {SIZES} A B: A ranks exchange heads, B are in a ring, and A x B is "
            "--context-parallel-size 4",
        ),
        (f"--cp 4 {SIZES} 2 2", 4, f"{SIZES} needs --cp-comm-type a2a+p2p"),
        (
            "--cp 2 --cp-comm-type p2p a2a",
            2,
            "--cp-comm-type has 2 values: give one for all layers, or 4, one per layer",
        ),
        ("--cp 2 --cp-chunks-per-rank 2", 2, "--cp-chunks-per-rank needs --cp-balance documents"),
        (f"--cp 2 {DOCUMENTS} --cp-chunks-per-rank 0", 2, "--cp-chunks-per-rank 0: must be at least 1"),
        (f"--cp 2 {BOTH} 0 2", 2, f"{SIZES} 0: must be at least 1"),
        ("--cp 0", 1, "--context-parallel-size 0: must be at least 1"),
        (
            "--cp 2 --cp-comm-type ring",
            2,
            "--cp-comm-type 'ring': expected one of p2p, all_gather, allgather, a2a, a2a+p2p",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_with_what_does(flags: str, world_size: int, problem: str) -> None:
    assert problems(flags, world_size) == [problem]


def test_samples_are_not_packed_by_length() -> None:
    lines = problems("--cp 2 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 4", 2)
    assert [line.split()[0] for line in lines] == ["--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank"]
    assert all("documents are a mask" in line and "--cp-balance documents" in line for line in lines)


def test_documents_cannot_be_balanced_where_ranks_have_all_tokens() -> None:
    (line,) = problems(f"--cp 2 --cp-comm-type a2a {DOCUMENTS}", 2)
    assert line.startswith("--cp-balance documents changes nothing with --cp-comm-type a2a")


@pytest.mark.parametrize(
    ("flags", "seq_length", "chunks"),
    [
        ("--cp 2", 1024, None),
        (f"--cp 1 {DOCUMENTS}", 1024, None),
        (f"--cp 2 {DOCUMENTS}", 1024, 16),
        (f"--cp 2 {DOCUMENTS}", 24, 12),
        (f"--cp 2 {DOCUMENTS}", 34, 1),
        (f"--cp 2 {DOCUMENTS} --cp-chunks-per-rank 32", 1024, 32),
    ],
)
def test_documents_are_dealt_in_16_chunks_per_rank_or_fewer(flags: str, seq_length: int, chunks: int | None) -> None:
    assert config_of(flags).parallel.chunks_per_rank(seq_length) == chunks


@pytest.mark.parametrize("flags", ["--cp-comm-type a2a", f"{SIZES} 2 2", DOCUMENTS, "--cp-chunks-per-rank 4"])
def test_options_without_several_ranks_are_off_with_a_note(flags: str) -> None:
    (note,) = notes(flags)
    assert note.startswith(f"{flags.split()[0]} ")
    assert note.endswith(": changes nothing, since --context-parallel-size is 1")
    assert config_of(flags) == config_of("")


def test_context_parallelism_for_short_samples_is_noted() -> None:
    (note,) = notes(f"--cp 4 {long(4088)}")
    assert note.startswith("--context-parallel-size 4 with --seq-length 4088: a rank has 1022 tokens of a sample.")
    assert "data parallelism" in note
    assert notes(f"--cp 4 {long(4096)}") == ()
    assert notes("--cp 1") == ()


ROTARY = f"--position-embedding-type rope {long(8192)}"


def test_a_rotary_base_for_short_samples_is_noted() -> None:
    (note,) = notes(f"--cp 2 {ROTARY}")
    assert note.startswith("--rotary-base 10000.0 with --seq-length 8192: ")
    assert "--use-rope-scaling" in note
    assert "--position-embedding-type yarn" in note


@pytest.mark.parametrize(
    "flags",
    [
        f"--cp 1 {ROTARY}",
        f"--cp 2 {ROTARY} --rotary-base 500000",
        f"--cp 2 {ROTARY} --use-rope-scaling",
        f"--cp 2 {ROTARY} --rotary-seq-len-interpolation-factor 4",
        f"--cp 2 {ROTARY} {long(4096)}",
        f"--cp 2 {long(8192)}",
        f"--cp 2 {ROTARY} --position-embedding-type yarn --rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 2048",
    ],
)
def test_other_positions_are_not_noted(flags: str) -> None:
    assert notes(flags) == ()


@pytest.mark.parametrize("flag", ["--context-parallel-size", "--cp"])
def test_text_is_generated_without_context_parallelism(flag: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_tool_arguments(generate.Arguments, "", ["--load", "run", flag, "2"])
    assert str(raised.value) == (
        "--context-parallel-size 2: must be 1, since each rank keeps the keys and values of whole texts (--tp and --pp "
        "split the model)"
    )
    assert parse_tool_arguments(generate.Arguments, "", ["--load", "run", flag, "1"]).load == "run"
