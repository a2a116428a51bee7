"""Pure functions of the search for silent corruption, and its options."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import megalite
from megalite.config.corruption import CorruptionConfig
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.corruption import replicas, rerun
from megalite.extras.corruption.bit_hash import BitHash
from megalite.extras.corruption.consequences import Consequences, Finding
from megalite.extras.corruption.rerun import Replicas, Result
from megalite.extras.corruption.watch import last_checked
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from tests.extras.corruption.corruption_run import HASHES, RERUNS
from tests.unit.test_config_validate import problems

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_each_bit_counts_and_so_does_its_place(dtype: torch.dtype) -> None:
    """Sizes around those of a block, and places that are not multiples of eight bytes."""
    bit_hash, generator = BitHash(CPU), random.Random(0)
    for size in (0, 1, 7, 64, 100_001, 300_000):
        values = torch.arange(size + 1).to(dtype)[1:]
        first = int(bit_hash.of(values))
        assert int(bit_hash.of(values.clone())) == first
        raw = values.clone().view(torch.uint8)
        for _ in range(20 if size else 0):
            byte, bit = generator.randrange(len(raw)), generator.randrange(8)
            raw[byte] ^= 1 << bit
            assert int(bit_hash.of(raw.view(dtype))) != first
            raw[byte] ^= 1 << bit
    swapped = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 4.0, 1.0, 2.0])
    assert int(bit_hash.of(swapped[0])) != int(bit_hash.of(swapped[1]))


def test_a_difference_names_the_minority() -> None:
    """Numbers 1 to 3 are held by ranks 0 to 2; 4 by rank 3 alone, which has changed it."""
    rows = [
        [(1, 10, False), (2, 20, False), (3, 30, False)],
        [(1, 10, False), (2, 21, False), (3, 30, False)],
        [(1, 10, False), (2, 20, False)],
        [(4, 40, True), (3, 31, False)],
    ]
    found = replicas.judge(rows)
    assert set(found) == {2, 3, 4}
    assert (found[2].wrong, found[2].others, found[2].is_certain, found[2].at_rest) == ((1,), (0, 2), True, False)
    assert (found[3].wrong, found[3].others) == ((3,), (0, 1))
    assert (found[4].wrong, found[4].others, found[4].is_certain, found[4].at_rest) == ((3,), (), True, True)
    pair = replicas.judge([[(1, 10, False)], [(1, 11, False)]])[1]
    assert (pair.wrong, pair.others, pair.is_certain) == ((0, 1), (), False)


def results(count: int, shifts: tuple[int, ...], wrong: dict[tuple[int, int], int]) -> list[Result]:
    """Return results of passes in which replica r of pass p, (p, r) in `wrong`, is wrong in that way."""
    return [
        Result((replica + shift) % count, replica, (wrong.get((number, replica), 0),))
        for number, shift in enumerate(shifts)
        for replica in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "shifts", "wrong", "kind", "replicas", "is_certain"),
    [
        (2, (0, 1), {}, "agrees", (), True),
        (2, (0, 1, 0, 1), {(0, 1): 5}, "transient", (1,), True),
        (2, (0, 1, 0, 1), {(1, 0): 5}, "transient", (0,), True),
        (2, (0, 1, 0, 1), {(number, 1): 5 for number in range(4)}, "sticky", (0, 1), False),
        (2, (0, 1, 0, 1), {(number, 1): 5 + number for number in range(4)}, "undecided", (0, 1), False),
        (3, (0, 1, 0, 2), {(number, 1): 5 for number in range(4)}, "sticky", (1,), True),
        (3, (0, 1, 0, 2), {(0, 2): 5, (2, 2): 6}, "sticky", (2,), True),
        (3, (0, 1, 0, 2), {(1, 2): 5}, "transient", (2,), True),
        (4, (0, 1, 0, 2), {(0, 3): 5, (1, 3): 5, (0, 1): 5}, "sticky", (3,), True),
    ],
)
def test_verdicts(
    count: int,
    shifts: tuple[int, ...],
    wrong: dict[tuple[int, int], int],
    kind: str,
    replicas: tuple[int, ...],
    is_certain: bool,
) -> None:
    judgement = rerun.judge(results(count, shifts, wrong))
    assert (judgement.kind, judgement.replicas, judgement.is_certain) == (kind, replicas, is_certain)


def test_a_replica_has_all_experts() -> None:
    """Four data-parallel ranks of each of two stages, with the experts on two of them each."""
    mesh = UnconnectedMesh(world_size=8, pipeline_parallel_size=2, expert_parallel_size=2)
    found = Replicas(mesh)
    assert (found.count, found.block) == (2, 2)
    assert found.ranks == [[0, 1, 4, 5], [2, 3, 6, 7]]


def ended(folder: Path, on_corruption: str, steps: tuple[int, ...], agreed: int) -> MegaliteError:
    for step in steps:
        (folder / f"iter_{step:07d}").mkdir(parents=True)
        (folder / f"iter_{step:07d}" / "manifest.json").write_text("{}")
    config = CorruptionConfig(rerun_on_replica_interval=1, on_corruption=on_corruption)  # type: ignore[arg-type]
    consequences = Consequences(config, folder, ParallelMesh(), None)
    return consequences.end(Finding("rank 0 (n0) is wrong", "memory changed", 9, [0], agreed), ["n0"])


@pytest.mark.parametrize(
    ("on_corruption", "steps", "code", "text", "tracker"),
    [
        ("go-back", (2, 4, 6), 85, "may iter_0000006. They will not be loaded: --resume auto goes back to step 4", "4"),
        (
            "go-back",
            (),
            85,
            "Steps after 5 may be wrong. They will not be loaded: --resume auto goes back to the b",
            "",
        ),
        ("go-back", (6,), 93, "may iter_0000006. There is no older one to go back to: remove them to begin anew", ""),
        ("go-back", (4,), 85, "be wrong. They will not be loaded: --resume auto goes back to step 4", ""),
        ("end", (4, 6), 93, "may iter_0000006. To go back, leave the node out, and write 4 into ", ""),
        ("end", (), 93, "Steps after 5 may be wrong. To go back, leave the node out, and begin anew", ""),
    ],
)
def test_suspect_checkpoints_are_left_out(
    on_corruption: str, steps: tuple[int, ...], code: int, text: str, tracker: str, tmp_path: Path
) -> None:
    error = ended(tmp_path, on_corruption, steps, 5)
    assert error.exit_code == code
    assert text in str(error)
    path = tmp_path / "latest_checkpointed_iteration.txt"
    assert (path.read_text().strip() if path.exists() else "") == tracker
    line = '{"node": "n0", "rank": 0, "why": "memory changed", "step": 9}\n'
    assert (tmp_path / "sick_nodes.jsonl").read_text() == line


def test_no_checkpoint_is_good_if_no_step_is_known_to_be(tmp_path: Path) -> None:
    error = ended(tmp_path, "go-back", (2, 4), 0)
    assert error.exit_code == 93
    assert "All steps so far may be wrong, and so may iter_0000002, iter_0000004. There is no older" in str(error)
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


REPLICAS = "--sites 2 --local-update local-sgd"


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("--on-corruption go-back", 2, "--on-corruption needs --check-weight-hash-across-dp-replicas-interval or --r"),
        (f"{HASHES} 1 --on-corruption go-back", 2, "--on-corruption go-back needs --save and --resume auto"),
        (f"{HASHES} 1 {REPLICAS}", 2, f"{HASHES}: with local updates or parameter servers, replicas have different"),
        (f"{RERUNS} 1 {REPLICAS}", 2, f"{RERUNS} needs data parallelism that sums all gradients in each step"),
        (f"{RERUNS} 1", 1, f"{RERUNS} needs two replicas of the network: one takes 1 rank, and there is 1"),
        (f"{RERUNS} 1 --tp 2", 2, f"{RERUNS} needs two replicas of the network: one takes 2 ranks, and there are 2"),
        (f"{RERUNS} 1 --optimizer-cpu-offload", 2, f"{RERUNS} does not go with an optimizer or weights on the host"),
        (f"{RERUNS} 1 --data-parallel-shares 1:3 --global-batch-size 8", 2, f"{RERUNS} needs replicas with equal"),
    ],
)
def test_a_relation_that_does_not_hold_is_refused(flags: str, world_size: int, expected: str) -> None:
    found = problems(flags, world_size)
    assert any(line.startswith(expected) for line in found), found


def test_a_program_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rerun_on_replica_interval"):
        megalite.Trainer(
            torch.nn.Linear(2, 2),
            dataset=[(torch.ones(2), torch.ones(2))],
            loss=torch.nn.functional.mse_loss,
            optimizer=megalite.SGD(lr=0.1),
            micro_batch_size=1,
            rerun_on_replica_interval=1,
        )


@pytest.mark.parametrize(
    ("iteration", "interval", "expected"), [(0, 5, 0), (4, 5, 0), (5, 5, 4), (9, 5, 4), (10, 5, 9), (7, None, 0)]
)
def test_a_start_trusts_what_the_last_check_before_it_has_seen(
    iteration: int, interval: int | None, expected: int
) -> None:
    assert last_checked(iteration, interval) == expected
