"""The layout for the ranks that are left: valid as flags, and as near to the run's own as it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.planner import replan as replan_module
from megalite.extras.planner.replan import Replanned, replan
from tests.end_to_end.runs import MOCK, SIZES, words

RUN = (
    *MOCK, *SIZES, *words("--micro-batch-size 2 --global-batch-size 16 --lr 1e-2 --train-iters 100 --save run"),
    *words("--resume auto --warm-restart --elastic --elastic-replan"),
)  # fmt: skip


def replanned(flags: str, nodes: int, node_ranks: int) -> tuple[Replanned, RunConfig, RunConfig]:
    """Return the layout, the run with it, and the run with its own."""
    argv = [*RUN, *words(flags)]
    found = replan(argv, nodes, node_ranks)
    own = parse_arguments(argv).config
    now = resolve(parse_arguments(found.argv).config, found.ranks)
    own = resolve(own, own.parallel.ranks_needed)
    assert (now.model, now.data, now.optimizer, now.recovery) == (own.model, own.data, own.optimizer, own.recovery)
    assert now.training.micro_batch_size == own.training.micro_batch_size
    assert found.ranks % node_ranks == 0
    return found, now, own


def test_what_does_not_fit_fewer_ranks_is_dropped_and_what_does_stays(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("parallel: {pipeline_model_parallel_size: 2, use_distributed_optimizer: true}\n")
    flags = f"--tp 2 --sequence-parallel --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --config {tmp_path}/"
    found, now, own = replanned(f"{flags}run.yaml --recompute-activations", 1, 2)
    assert found.ranks == 2
    parallel = now.parallel
    assert parallel.model_parallel_size in (1, 2)
    assert (parallel.zero_stage, parallel.sequence_parallel) == (1, parallel.tensor_model_parallel_size > 1)
    assert now.training.recompute_granularity == own.training.recompute_granularity == "selective"
    assert " instead of TP 2 with SP x PP 2 x DP 1 (--" in found.text
    assert "--micro-batch-size" not in found.text


def test_stages_of_unequal_size_are_written_out() -> None:
    found, now, _ = replanned("--num-layers 4 --tp 2 --pp 2", 3, 1)  # 3 divides neither heads nor samples
    assert found.ranks == now.parallel.pipeline_model_parallel_size == 3
    assert now.parallel.pipeline_model_parallel_layout is not None


@pytest.mark.wide_except("*-|*-")
@pytest.mark.parametrize("letters", ["*-|*-", "-*|*-|*-|-*"])
def test_stages_of_a_pattern_are_replaced(letters: str) -> None:
    layers = f"--hybrid-layer-pattern={letters} --num-layers {len(letters.replace('|', ''))}"
    found, now, own = replanned(f"{layers} --tp 2 --pp 2", 1, 2)
    assert own.parallel.pipeline_model_parallel_layout is not None
    assert now.parallel.model_parallel_size <= found.ranks == 2


def test_nodes_that_no_layout_can_use_wait() -> None:
    """Three ranks divide nothing here, not even two layers."""
    found, now, _ = replanned("--tp 4", 3, 1)
    assert (found.ranks, now.parallel.model_parallel_size <= 2) == (2, True)


def test_bits_that_are_promised_keep_the_width() -> None:
    bits = "--deterministic-mode --bitwise-elastic"
    _, now, _ = replanned(f"--num-layers 4 --tp 2 --pp 2 --use-distributed-optimizer {bits}", 1, 2)
    sizes = now.parallel.tensor_model_parallel_size, now.parallel.pipeline_model_parallel_size
    assert (sizes, now.parallel.zero_stage) == ((2, 1), 1)
    with pytest.raises(ConfigurationError, match="--bitwise-elastic keeps --tp 4 and --cp 1: no layout of 2 GPUs"):
        replan([*RUN, *words(f"--tp 4 --pp 2 {bits}")], 1, 2)


@pytest.mark.wide
def test_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are tried where nothing fits with the recomputation of the run; the nearest one is named if none does."""
    more = "--num-layers 8 --seq-length 256 --max-position-embeddings 256 --hidden-size 64"
    argv = [*RUN, *words(f"--tp 2 --pp 2 {more} --hidden-dropout 0 --attention-dropout 0")]
    reserved = 0.3e9  # of every process, in clusters.toml

    def with_room(room: float) -> RunConfig:
        monkeypatch.setattr(replan_module, "memory_limit", lambda: 2 * (reserved + room))
        return resolve(parse_arguments(replan(argv, 1, 2).argv).config, 2)

    assert with_room(2e7).training.recompute_granularity is None
    assert with_room(1.15e7).training.recompute_granularity == "full"
    with pytest.raises(ConfigurationError, match=r"no layout of 2 ranks fits: stage 0: 0\.3 of 0\.3 GiB"):
        with_room(1e6)
