"""Curves of a run under Megatron-LM's names, so that those of both lie over each other.

A page of curves is sorted by name: what has no slash is a group of its own, and capital letters come first. So losses
are there twice, once in the group "Loss", which is the first, and once under the name of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

from megalite.training.metrics import Value

NAMES = {
    "lm_loss": "lm loss",
    "learning_rate": "learning-rate",
    "loss_scale": "loss-scale",
    "world_size": "world-size",
    "grad_norm": "grad-norm",
    "num_zeros_in_grad": "num-zeros",
    "params_norm": "params-norm",
    "valid_perplexity": "lm loss validation ppl",
    "iteration_time_s": "iteration-time",
    "model_tflops_per_device": "throughput",
    "peak_memory_bytes": "mem-max-allocated-bytes",
    "consumed_samples": "samples vs steps",
    "load_balancing_loss": "load_balancing_loss",
    "seq_load_balancing_loss": "seq_load_balancing_loss",
    "global_load_balancing_loss": "global_load_balancing_loss",
    "moe_z_loss": "z_loss",
    "max_attention_logit": "max_attention_logit",
}
"""Keys of records with the names that Megatron-LM has for them."""
BATCH_SIZE = "batch-size"
VALIDATION, TEST = "lm loss validation", "lm loss test"
"""Losses of evaluations of a language model. Megatron-LM writes that on test data as one more validation."""
OVER_SAMPLES = {
    *("lm loss", "learning-rate", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm"),
    *(BATCH_SIZE, VALIDATION, "lm loss validation ppl"),
}
"""Names that Megatron-LM also draws over consumed samples, as "NAME vs samples"."""
_GROUPS = {
    "progress": "consumed_tokens skipped left_out_samples dropped_gradients kept_micro_batches",
    "speed": "tokens_per_second tokens_per_second_per_device samples_per_second samples_per_second_per_device mfu",
    "time": "memory_copy_s slowest_rank slowest_rank_work busiest_context_parallel_rank",
    "memory": "host_memory_bytes predicted_memory_bytes",
    "communication": "bytes_sent",
    "optimizer": "decoupled_learning_rate weight_decay",
    "experts": "router_entropy dropped_assignments",
}
_GROUP_OF = {key: group for group, keys in _GROUPS.items() for key in keys.split()}


class Curves:
    """Names and values of the points of each record.

    Args:
        consumed_samples: samples that the run had consumed before the first record.
        left_out: keys of records that make no curve.
    """

    def __init__(self, consumed_samples: int, left_out: Collection[str] = ()) -> None:
        self._consumed = consumed_samples
        self._left_out = {"iteration", *left_out}

    def of(self, record: Mapping[str, Value]) -> dict[str, float]:
        """Return the points of a record by the names of their curves."""
        points = {
            self._name(key, record): float(value)
            for key, value in record.items()
            if key not in self._left_out and value is not None
        }
        if "grad_norm" in record:
            consumed = cast(int, record["consumed_samples"])
            points[BATCH_SIZE], self._consumed = float(consumed - self._consumed), consumed
        return points

    def _name(self, key: str, record: Mapping[str, Value]) -> str:
        if key in NAMES:
            return NAMES[key]
        if key in ("valid_loss", "test_loss") and "consumed_tokens" in record:
            return VALIDATION if key == "valid_loss" else TEST
        base, _, part = key.partition("/")
        if part and base in ("valid_loss", "valid_perplexity") and "consumed_tokens" in record:
            return f"{VALIDATION}-{part}{' ppl' if base == 'valid_perplexity' else ''}"
        return key if part else f"{_group(key)}/{key}"


def _is_over_samples(name: str) -> bool:
    return name in OVER_SAMPLES or name.startswith(f"{VALIDATION}-")


def _group(key: str) -> str:
    return _GROUP_OF.get(key, "Loss" if key.endswith(("loss", "bits_per_byte")) else "other")


def losses(points: Mapping[str, float]) -> dict[str, float]:
    """Return the losses of Megatron-LM's names once more, in the group that is the first of a page."""
    return {f"Loss/{name}": points[name] for name in ("lm loss", VALIDATION, TEST) if name in points}


def over_samples(points: Mapping[str, float]) -> dict[str, float]:
    """Return the points that Megatron-LM also draws over consumed samples, by their names there."""
    return {f"{name} vs samples": value for name, value in points.items() if _is_over_samples(name)}
