"""Other scripts: their output equals that of their programs without SLURM."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.runs import GENERATE, contents, ended
from tests.harness.job import Job
from tests.harness.tool import run_tool
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SlurmJob, submit

pytestmark = pytest.mark.slurm

BYTES = ("--tokenizer-type", "ByteTokenizer", "--append-eod")


def documents(number: int, lines: int) -> str:
    return "\n".join(json.dumps({"text": f"document {line} of {number}"}) for line in range(lines))


def preprocess(cluster: Cluster, directory: Path, *options: object, **variables: object) -> SlurmJob:
    """Submit the shards of DIRECTORY/part_*.jsonl, which go to DIRECTORY/sharded."""
    settings = {"INPUT": f"{directory}/part_*.jsonl", "OUTPUT": directory / "sharded"} | variables
    script = ("--cpus-per-task=1", *options, "slurm/preprocess_data.sbatch", *BYTES)
    return submit(cluster, *script, directory=directory, **settings)


def assert_merged(directory: Path) -> None:
    """Asserts that the shards became what one process writes."""
    arguments = (*BYTES, "--input", f"{directory}/part_*.jsonl", "--output-prefix", directory / "whole")
    run_tool("preprocess", *arguments)
    for suffix in ("bin", "idx"):
        sharded, whole = (directory / f"{name}_text_document.{suffix}" for name in ("sharded", "whole"))
        assert sharded.read_bytes() == whole.read_bytes()


def test_shards_of_a_corpus_are_merged_to_the_whole(cluster: Cluster, tmp_path: Path) -> None:
    """Merge only the shards of this corpus: changes are refused, whether its shards exist or not."""
    for number in range(5):
        (tmp_path / f"part_{number}.jsonl").write_text(documents(number, 3 + number))
    (tmp_path / "sharded_text_document.idx").write_text("of an earlier corpus")
    preprocess(cluster, tmp_path, "--array=0,2", SHARDS=3).wait()
    bad_arrays = [preprocess(cluster, tmp_path, array) for array in ("--array=1-3", "--array=0-2:2", "--array=1")]
    others = [preprocess(cluster, tmp_path, "--array=1,2", SHARDS=4)]
    for job in others:
        job.wait(exit_code=64)
    (tmp_path / "part_5.jsonl").write_text(documents(5, 1))
    others.append(preprocess(cluster, tmp_path, "--array=0,1", SHARDS=3))
    for job in (*bad_arrays, *others):
        job.wait(exit_code=64)
    assert all("--array=0-N" in job.log for job in bad_arrays)
    assert all("sharded.parts is from other shards, flags or files" in job.log for job in others)
    assert "> 4 shards" in others[0].log
    assert "part_5.jsonl, " in others[1].log
    (tmp_path / "part_5.jsonl").unlink()

    preprocess(cluster, tmp_path, "--array=1", SHARDS=3).wait()
    assert_merged(tmp_path)
    written = (tmp_path / "sharded_text_document.idx").stat()
    preprocess(cluster, tmp_path, "--array=0-2").wait()
    assert (tmp_path / "sharded_text_document.idx").stat() == written


def test_a_shard_goes_on_after_its_time_limit_and_after_a_more_important_job(cluster: Cluster, tmp_path: Path) -> None:
    """Each has a file of some chunks, and a pipe, at which it waits."""
    pipes = [tmp_path / f"part_{number}.jsonl" for number in (1, 3)]
    for number, pipe in enumerate(pipes):
        (tmp_path / f"part_{2 * number}.jsonl").write_text(documents(number, 60_000))
        os.mkfifo(pipe)
    job = preprocess(cluster, tmp_path, "--array=0-1")
    for shard in range(2):
        journal = tmp_path / f"sharded.parts/0000{shard}.partial/journal"
        job.until(lambda journal=journal: journal.exists() and b'"entry"' in journal.read_bytes())  # type: ignore[misc]
    (node,) = (each["NodeList"] for each in job.fields() if each["ArrayTaskId"] == "1")
    other = ("--partition=high", f"--nodelist={node}", "--exclusive", "--wrap=sleep 1")
    submit(cluster, *other, directory=tmp_path).wait()
    cluster.ask("scancel", "--batch", "--signal=USR1", f"{job.number}_0", check=False)
    job.until(lambda: all(job.log.count(f"shard {shard} of 2: ") == 2 for shard in range(2)))
    for pipe in pipes:
        threading.Thread(target=pipe.write_text, args=[documents(9, 2)], daemon=True).start()
    job.wait()
    assert "requeue: another job takes the node" in job.log
    assert "requeue: the time limit is near" in job.log
    assert job.log.count("continuing after") == 2
    for pipe in pipes:
        pipe.unlink()
        pipe.write_text(documents(9, 2))
    assert_merged(tmp_path)


def test_a_shard_that_comes_to_its_time_limit_with_nothing_is_given_up(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "part_0.jsonl").write_text(documents(0, 1))
    container = tmp_path / "container.sh"
    container.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nsleep 99\n")
    container.chmod(0o755)
    job = preprocess(cluster, tmp_path, CONTAINER=container)
    job.until((tmp_path / "started").exists)
    cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.wait(exit_code=93)
    assert "no progress in this time" in job.log


def test_one_job_alone_merges(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "part_0.jsonl").write_text(documents(0, 1))
    parts = tmp_path / "sharded.parts"
    parts.mkdir()
    merging = parts / "merging"
    merging.symlink_to((merger := submit(cluster, "--wrap=sleep 99", directory=tmp_path)).number)
    job = preprocess(cluster, tmp_path)
    job.wait()
    assert f"job {merger.number} merges the shards" in job.log
    cluster.ask("scancel", merger.number)
    merger.until(merger.ended)
    job = preprocess(cluster, tmp_path)
    job.wait(exit_code=64)
    assert f"{merging} names job {merger.number}, which was ended" in job.log
    assert not list(tmp_path.glob("sharded_text_document.*"))
    merging.unlink()
    preprocess(cluster, tmp_path).wait()
    assert_merged(tmp_path)


def test_a_checkpoint_is_converted(cluster: Cluster, undisturbed: Callable[[int], Path], tmp_path: Path) -> None:
    flags = ("--loader", "megalite", "--saver", "hf", "--load-dir", undisturbed(2), "--save-dir")
    script = ("--cpus-per-task=1", "slurm/convert_checkpoint.sbatch", *flags, tmp_path / "by_job")
    submit(cluster, *script, directory=tmp_path).wait()
    run_tool("convert", *flags, tmp_path / "here")
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


def test_text_is_made_in_all_the_memory_of_a_node_and_ends_as_its_last_start_did(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The first one leaves another code, and is requeued."""
    container = tmp_path / "container.sh"
    container.write_text(
        "#!/bin/sh\nset -C # as the programs do: what is there stays\n"
        'if [ -n "$SLURM_RESTART_COUNT" ]; then echo 0 >"$MEGALITE_EXIT_FILE"; exit; fi\n'
        'echo 85 >"$MEGALITE_EXIT_FILE"\nscontrol requeue "$SLURM_JOB_ID"\nsleep 99\n'
    )
    container.chmod(0o755)
    variables = {"RANKS_PER_NODE": 1, "LAUNCHER": "srun", "CONTAINER": container, "LOGS": tmp_path / "logs"}
    cluster.ask("scontrol", "update", "PartitionName=main", "DefMemPerNode=500")
    try:
        job = submit(cluster, "slurm/generate.sbatch", directory=tmp_path, **variables)
        job.wait()
    finally:
        cluster.ask("scontrol", "update", "PartitionName=main", "DefMemPerNode=0")
    assert job.restarts == 1
    assert job.fields()[0]["MinMemoryNode"] == "0"


@pytest.mark.parametrize(("script", "code"), [("generate", 93), ("convert_checkpoint", 64), ("preprocess_data", 64)])
def test_an_error_of_a_tool_is_the_exit_code_of_the_job(
    script: str, code: int, cluster: Cluster, tmp_path: Path
) -> None:
    """Give each script an error: a damaged checkpoint, a missing flag, a pattern that matches no file."""
    damaged = tmp_path / "iter_0000001" / "manifest.json"
    damaged.parent.mkdir()
    damaged.write_text("{}")
    variables = {"RANKS_PER_NODE": 1, "LOGS": tmp_path / "logs", "INPUT": "nothing*", "OUTPUT": tmp_path / "out"}
    options = ("--cpus-per-task=1", f"slurm/{script}.sbatch", "--load", tmp_path)
    submit(cluster, *options, directory=tmp_path, **variables).wait(exit_code=code)
