"""Options of recovery: each relation that does not hold has its line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megalite
from megalite.config.recovery import RecoveryConfig
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.recovery import launched
from megalite.process.place import Place, place_from_environment
from tests.end_to_end.runs import PRETRAIN
from tests.unit.test_config_validate import config_of, problems

SAVED = "--save run --resume auto"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--warm-restart --save run", "--warm-restart needs --resume auto"),
        ("--warm-restart", "--warm-restart needs --save, the run directory"),
        ("--warm-restart --save s3://bucket/run --resume auto", "--warm-restart needs a --save that is a folder"),
        (f"--memory-checkpoint-interval 2 {SAVED}", "--memory-checkpoint-interval needs --warm-restart"),
        (f"--spare-nodes 1 {SAVED}", "--spare-nodes needs --warm-restart"),
    ],
)
def test_a_relation_that_does_not_hold_is_refused(flags: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(flags)), problems(flags)


def test_a_launcher_that_does_not_count_the_ranks_of_a_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(f"--warm-restart {SAVED}")
    with pytest.raises(ConfigurationError, match="set LOCAL_WORLD_SIZE on every rank"):
        launched.run_warm(config, Place(0, 0, 2, None, "localhost", 1))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (Place(0, 0, 4, None, "localhost", 1), "set LOCAL_WORLD_SIZE on every rank"),
        (Place(0, 0, 4, 2, "localhost", 1), "has started 4 ranks, 2 on this node: start at least 3 nodes"),
        (Place(0, 0, 8, 3, "localhost", 1), "with equal numbers of ranks"),
        (Place(1, 0, 6, 2, "localhost", 1), "rank 1 has the local rank 0 of 2: start the ranks of each node one after"),
    ],
)
def test_nodes_that_cannot_have_spare_ones_are_refused(place: Place, expected: str) -> None:
    config = config_of(f"--warm-restart --spare-nodes 2 {SAVED}")
    with pytest.raises(ConfigurationError, match=expected):
        config.recovery.ranks_that_train(place.world_size, place.local_world_size)
        launched.run_warm(config, place)


def test_a_rank_of_a_spare_node_has_the_place_that_its_agent_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher's variables have other numbers."""
    of_launcher = {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_ID": "0"}
    of_agent = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n0"}
    for name, value in (of_launcher | of_agent | {"MASTER_PORT": "1", "MEGALITE_GENERATION": "2"}).items():
        monkeypatch.setenv(name, value)
    assert place_from_environment() == Place(2, 0, 4, 2, "n0", 1)


def test_spare_nodes_do_not_count_among_the_ranks() -> None:
    recovery = config_of(f"--warm-restart --spare-nodes 2 {SAVED}").recovery
    assert recovery.ranks_that_train(40, 8) == 24
    assert RecoveryConfig().ranks_that_train(3, None) == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"warm_restart": True}, "warm_restart=... needs Trainer(save=...), the run directory"),
        ({"warm_restart": True, "spare_nodes": 1}, "spare_nodes=1 changes nothing here"),
        ({"warm_restart": True, "save": "run"}, "warm_restart=True needs a program in a file or a module"),
    ],
)
def test_a_program_of_ones_own_that_cannot_start_again_is_refused(
    given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("__spec__", "__file__"):
        monkeypatch.setattr(sys.modules["__main__"], name, None, raising=False)
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        megalite.Trainer(
            torch.nn.Linear(2, 2),
            dataset=[(torch.ones(2), torch.ones(2))],
            loss=torch.nn.functional.mse_loss,
            optimizer=megalite.SGD(lr=0.1),
            micro_batch_size=1,
            **given,
        )


def test_a_plain_run_imports_nothing_of_it(tmp_path: Path) -> None:
    flags = "--mock-data --tokenizer-type NullTokenizer --vocab-size 8 --num-layers 1 --hidden-size 8 "
    flags += "--num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --lr 0.1 "
    flags += f"--train-iters 1 --eval-iters 0 --save {tmp_path / 'run'} --resume auto"
    code = (
        f"import runpy, sys; sys.argv = [{str(PRETRAIN)!r}, *{flags.split()!r}]\n"
        f"sys.path.insert(0, {str(PRETRAIN.parent)!r})\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert not [name for name in sys.modules if 'recovery' in name and 'extras' in name], sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "AssertionError" not in done.stderr


def test_resolving_keeps_the_options() -> None:
    assert resolve(config_of(f"--warm-restart {SAVED}"), 1).recovery.warm_restart
