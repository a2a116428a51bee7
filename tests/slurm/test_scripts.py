"""What the other scripts write is what their programs write without SLURM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.runs import GENERATE, contents, ended
from tests.harness.job import Job
from tests.harness.tool import run_tool
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import submit

pytestmark = pytest.mark.slurm


def test_shards_of_a_corpus_are_merged_to_the_whole(cluster: Cluster, tmp_path: Path) -> None:
    for number in range(5):
        lines = [json.dumps({"text": f"document {line} of {number}"}) for line in range(3 + number)]
        (tmp_path / f"part_{number}.jsonl").write_text("\n".join(lines))
    pattern = f"{tmp_path}/part_*.jsonl"
    flags = ("--tokenizer-type", "ByteTokenizer", "--append-eod")
    options = ("--array=0-2", "--cpus-per-task=1", "slurm/preprocess_data.sbatch")
    submit(cluster, *options, *flags, directory=tmp_path, INPUT=pattern, OUTPUT=tmp_path / "sharded").wait()
    run_tool("tools.preprocess_data", *flags, "--input", pattern, "--output-prefix", tmp_path / "whole")
    for suffix in ("bin", "idx"):
        sharded, whole = (tmp_path / f"{name}_text_document.{suffix}" for name in ("sharded", "whole"))
        assert sharded.read_bytes() == whole.read_bytes()


def test_a_checkpoint_is_converted(cluster: Cluster, undisturbed: Callable[[int], Path], tmp_path: Path) -> None:
    flags = ("--loader", "megalite", "--saver", "hf", "--load-dir", undisturbed(2), "--save-dir")
    script = ("--cpus-per-task=1", "slurm/convert_checkpoint.sbatch", *flags, tmp_path / "by_job")
    submit(cluster, *script, directory=tmp_path).wait()
    run_tool("tools.checkpoint.convert", *flags, tmp_path / "here")
    assert contents(tmp_path / "by_job") == contents(tmp_path / "here")
    assert "model.safetensors" in contents(tmp_path / "here")


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_text_of_a_model_that_is_split_over_nodes(
    launcher: str, cluster: Cluster, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    flags = ("--load", undisturbed(2), "--prompt", "1 2 3", "--max-new-tokens", 8, "--temperature", 0, "--output")
    container = tmp_path / "container.sh"
    container.write_text(f'#!/bin/sh\necho "$SLURMD_NODENAME" >>{tmp_path}/entered\nexec "$@"\n')
    container.chmod(0o755)
    script = ("--nodes=2", "slurm/generate.sbatch", *flags, tmp_path / "on_nodes")
    variables = {"LAUNCHER": launcher, "RANKS_PER_NODE": 1, "CONTAINER": container, "LOGS": tmp_path / "logs"}
    submit(cluster, *script, directory=tmp_path, **variables).wait()
    with Job([GENERATE, *flags, tmp_path / "here"], 1, tmp_path / "job") as job:
        ended(job)
    assert (tmp_path / "on_nodes").read_text() == (tmp_path / "here").read_text()
    assert sorted((tmp_path / "entered").read_text().split()) == list(cluster.nodes[:2])


@pytest.mark.parametrize(("script", "code"), [("generate", 93), ("convert_checkpoint", 64), ("preprocess_data", 64)])
def test_an_error_of_a_tool_is_the_exit_code_of_the_job(
    script: str, code: int, cluster: Cluster, tmp_path: Path
) -> None:
    """Where there is no checkpoint to load, a flag is missing, and no file is like the pattern."""
    variables = {"RANKS_PER_NODE": 1, "LOGS": tmp_path / "logs", "INPUT": "nothing*", "OUTPUT": tmp_path / "out"}
    options = ("--cpus-per-task=1", f"slurm/{script}.sbatch", "--load", tmp_path)
    submit(cluster, *options, directory=tmp_path, **variables).wait(exit_code=code)
