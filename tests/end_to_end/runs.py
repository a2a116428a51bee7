"""Runs of the program on forked ranks, and readers of their results that do not use the program's own readers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.harness.close import assert_bits_equal
from tests.harness.job import Job
from tests.harness.metrics_page import undocumented

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "pretrain_gpt.py"
GENERATE = ROOT / "tools" / "generate.py"
EVALUATE = ROOT / "tools" / "evaluate.py"


def words(text: str) -> tuple[str, ...]:
    """Split flags as a shell does."""
    return tuple(shlex.split(text))


MOCK = words("--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --no-report")
BYTES = words("--mock-data --tokenizer-type ByteTokenizer --no-report")
SIZES = words("--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 32")
COURSE = words("--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --log-interval 1")
NO_DROPOUT = words("--hidden-dropout 0 --attention-dropout 0")
GPT2 = (*SIZES, *COURSE)
LLAMA = (
    *GPT2,
    *words("--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"),
    *words("--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"),
)
FAMILIES: Mapping[str, tuple[str, ...]] = {"gpt2": GPT2, "llama": LLAMA}

_OF_THE_MACHINE = (
    *("time", "per_second", "tflops", "mfu", "memory", "kept_micro_batches"),
    *("wait_s", "communication_share", "scaling_efficiency"),
)


@dataclass(frozen=True)
class Ended:
    """Job that has ended."""

    codes: list[int]
    stdout: str
    """Output of rank 0; the others print nothing (`run` asserts it)."""
    stderr: str
    """Stderr of all ranks together."""


Run = Callable[..., Ended]
"""Function `run("--flag", value, ..., world_size=1, expected=0)` that trains; each rank must end with `expected`."""
Start = Callable[..., Job]


def ended(job: Job, expected: int | None = 0, timeout: float = 240.0) -> Ended:
    """Wait for the job; assert exit codes, that only rank 0 prints, and that only failed jobs write error messages."""
    codes = job.wait(timeout)
    stderr = "".join(job.stderr(rank) for rank in range(job.world_size))
    if expected is not None:
        assert codes == [expected] * job.world_size, f"{codes}\n{job.stdout(0)}\n{stderr}"
        if expected in (0, 85):
            assert stderr == "", stderr
    assert all(job.stdout(rank) == "" for rank in range(1, job.world_size))
    return Ended(codes, job.stdout(0), stderr)


# ---------------------------------------------------------------------------------------------------- what runs leave


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without values that depend on the machine's speed."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert not (missing := undocumented(key for line in lines for key in line)), f"docs/operations.md lacks {missing}"
    return [{k: v for k, v in line.items() if not any(part in k for part in _OF_THE_MACHINE)} for line in lines]


def iterations(directory: Path) -> list[int]:
    """Return the iterations of the training steps in metrics.jsonl, in the order of the lines."""
    return [line["iteration"] for line in metrics(directory) if "lm_loss" in line]


def losses(directory: Path) -> list[float]:
    """Return the losses of the training steps."""
    return [line["lm_loss"] for line in metrics(directory) if "lm_loss" in line]


def latest_iteration(directory: Path) -> int:
    """Return the iteration in the tracker file."""
    return int((directory / "latest_checkpointed_iteration.txt").read_text())


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the logical tensors of a checkpoint by name, assembled from its boxes; assert that they are complete."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    tensors = {}
    for name, entry in manifest["tensors"].items():
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        seen = torch.zeros(entry["shape"], dtype=torch.int32)
        for box in entry["boxes"]:
            place = tuple(slice(o, o + s) for o, s in zip(box["offset"], box["size"], strict=True))
            with safe_open(checkpoint / box["file"], "pt") as file:
                whole[place] = file.get_tensor(f"{name}@{','.join(map(str, box['offset']))}")
            seen[place] += 1
        assert bool((seen == 1).all()), f"{name} in {checkpoint}"
        tensors[name] = whole
    return tensors


def saved_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint by logical name, as the oracle takes them."""
    tensors = saved_tensors(checkpoint)
    return {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}


def assert_same_checkpoint(actual: Path, expected: Path) -> None:
    """Assert the same tensors, bit for bit, and the same consumed samples and iteration."""
    ours, theirs = saved_tensors(actual), saved_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_bits_equal(ours[name], tensor, name)
    states = [json.loads((path / "manifest.json").read_text())["training"] for path in (actual, expected)]
    assert states[0] == states[1]


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file below a folder, to check that nothing has changed."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
