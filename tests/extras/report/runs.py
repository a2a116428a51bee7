"""Run directories with records, as a run would leave them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0


def step(number: int, **others: Any) -> dict[str, Any]:
    """Return the record of a step of ten samples of 100 tokens, which takes 2 s of the 3 s between two lines."""
    record = {
        "iteration": number,
        "consumed_samples": 10 * number,
        "consumed_tokens": 1000 * number,
        "lm_loss": 4.0 - 0.01 * number,
        "grad_norm": 1.0 + 1.0 / number,
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "skipped": False,
        "iteration_time_s": 2.0,
        "tokens_per_second": 500.0,
        "mfu": None,
        "peak_memory_bytes": 1000 + number,
        "wall_time": BEGAN + 3.0 * number,
    }
    return record | others


def validation(number: int, loss: float, **others: Any) -> dict[str, Any]:
    """Return the record of an evaluation after a step."""
    counts = {"iteration": number, "consumed_samples": 10 * number, "consumed_tokens": 1000 * number}
    return counts | {"valid_loss": loss, "wall_time": BEGAN + 3.0 * number + 0.5} | others


def write_run(
    folder: Path,
    records: Iterable[Mapping[str, Any]],
    *,
    config: str | None = None,
    ledger: Iterable[Mapping[str, Any]] = (),
    after: bytes = b"",
    done: bool = False,
) -> Path:
    """Write a run directory, and return it. `after`: bytes behind the last line of its metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_bytes(lines.encode() + after)
    if config is not None:
        (folder / "config.yaml").write_text(config)
    if decisions := list(ledger):
        (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in decisions))
    if done:
        (folder / "DONE").write_text("1\n")
    return folder
