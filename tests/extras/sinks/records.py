"""Records for the tests of sinks."""

from __future__ import annotations

from megalite.training.metrics import Value


def step(iteration: int, **changes: Value) -> dict[str, Value]:
    """Return the record of a step of eight samples of 64 tokens."""
    record: dict[str, Value] = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "consumed_tokens": 512 * iteration,
        "lm_loss": 4.5 / iteration,
        "grad_norm": 0.25,
        "learning_rate": 1e-4,
        "loss_scale": 1.0,
        "skipped": False,
        "iteration_time_s": 0.5,
        "tokens_per_second": 1024.0,
        "tokens_per_second_per_device": 512.0,
        "model_tflops_per_device": 0.75,
        "mfu": None,
        "peak_memory_bytes": 1 << 20,
        "bytes_sent": 0,
    }
    return record | changes


def evaluation(iteration: int, valid_loss: float) -> dict[str, Value]:
    """Return the record of an evaluation after a step."""
    return {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "consumed_tokens": 512 * iteration,
        "valid_loss": valid_loss,
    }
