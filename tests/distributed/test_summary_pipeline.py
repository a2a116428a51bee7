"""Output of a run on a pipeline at its start."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.parallel.mesh import ParallelMesh
from megalite.tasks.gpt_task import GPTTask
from megalite.tasks.memory import Memory
from megalite.tasks.summary import measured_memory
from megalite.training.data import open_data
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

FLAGS = """--mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 8 --hidden-size 128
--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8
--lr 1e-2 --train-iters 2 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --pp 2"""


def start(flags: str) -> tuple[Memory, dict[str, object]]:
    """Return the measured memory, and the output on the screen."""
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, dist.get_world_size())
    mesh = ParallelMesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_model_parallel_size,
    )
    trainer = gpt_trainer(config, open_data(config), mesh)
    task = trainer.task
    assert isinstance(task, GPTTask)
    return measured_memory(trainer, task), task.summary(trainer)


IN_FLIGHT = {
    "": (2, 1),
    "--pipeline-schedule gpipe": (8, 8),
    "--num-virtual-stages-per-pipeline-rank 2": (5, 3),
    "--pipeline-schedule zb-v": (4, 4),
    "--pipeline-schedule zb-h1 --recompute-granularity selective": (2, 2),
    "--global-batch-size 1": (1, 1),
}
"""Largest number of micro-batches in chunks that each rank keeps."""


@pytest.mark.parametrize("flags", wide_except(IN_FLIGHT, list(IN_FLIGHT)[::2]))
def test_activations_are_those_of_the_micro_batches_in_flight(flags: str, rank_pools: RankPools) -> None:
    ranks = rank_pools(2).run(start, flags)
    for rank, (measured, _) in enumerate(ranks):
        elements = measured.parameters // 4
        # The first rank of a V has both ends, and a sum of gradients for each use of the tied table.
        again = 256 * 128 if "zb-v" in flags and rank == 0 else 0
        assert (measured.gradients, measured.optimizer) == (4 * (elements + again), 8 * elements)
    # The first rank has no more than layers and some numbers a token; the loss, where it is on the last rank, is less
    # than a layer.
    ((first, _), (last, _)) = ranks
    chunks = 2 if "virtual" in flags or "zb-v" in flags else 1
    most_first, most_last = IN_FLIGHT[flags]
    layer = 64 * 128 * 4 * (4 + 3 + 1 + 8)  # norms, projections, the core's output and the feed-forward's inside
    assert first.activations == pytest.approx(most_first * 4 / chunks * layer, rel=0.1)
    assert last.activations == pytest.approx(most_last * 4 / chunks * layer, rel=0.3)


def test_the_screen_tells_who_holds_what(rank_pools: RankPools) -> None:
    for _, lines in rank_pools(2).run(start, "--num-virtual-stages-per-pipeline-rank 2"):
        assert lines["layout"] == "TP 1 x PP 2 x DP 1, ZeRO 0, 8 micro-batches per rank"
        assert list(lines)[3:6] == ["pipeline", "  rank 0", "  rank 1"]
        assert "8" in str(lines["pipeline"])
        assert str(lines["model"]).startswith("1,")
        kinds = ["memory", "  parameters", "  gradients", "  optimizer", "  activations"]
        assert [name for name in lines if name in kinds] == kinds
        assert str(lines["memory"]).endswith("MiB on rank 0")


def test_the_screen_tells_what_muon_leaves_to_adam(rank_pools: RankPools) -> None:
    """The stages have different parts; a tied table counts once, the padding of the vocabulary never."""
    matrices = 8 * 12 * 128 * 128
    vectors = 8 * (4 + 5 + 4) * 128 + 2 * 128  # of attention, of the feed-forward and of norms
    positions, words = 64 * 128, 251 * 128
    for _, lines in rank_pools(2).run(start, "--optimizer muon"):
        assert lines["optimizer"] == (
            f"muon for {matrices:,} parameters in matrices of layers; adam for {positions + words + vectors:,}: "
            f"embedding.position {positions:,}, embedding.word {words:,}, norms and biases {vectors:,}"
        )
    for _, lines in rank_pools(2).run(start, "--optimizer muon --untie-embeddings-and-output-weights"):
        assert str(lines["optimizer"]).endswith(f"norms and biases {vectors:,}, output {words:,}")
    for _, lines in rank_pools(2).run(start, ""):
        assert "optimizer" not in lines
