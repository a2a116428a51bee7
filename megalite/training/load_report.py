"""Report on the checkpoint that a run has loaded: restored parts, and flags that differ from the saved ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

import torch

from megalite.checkpoint import Manifest, TrainingState, saved_section
from megalite.checkpoint.compatibility import NOT_THE_FUNCTION
from megalite.checkpoint.manifest import STATE, dtype_name
from megalite.config import OptimizerConfig, TrainingConfig
from megalite.config.run import TaskConfig, section_types
from megalite.config.tokenizer import TokenizerFlags
from megalite.conversion.folder_keys import KeyFate
from megalite.conversion.opened import OpenedModel
from megalite.errors import CheckpointError
from megalite.optim.learning_rate import LearningRateSchedule, rate_schedules
from megalite.storage import AnyPath
from megalite.training.branch import PARENTS
from megalite.training.data import NOT_OF_THE_SAMPLES
from megalite.training.ledger import Decision
from megalite.training.metrics import Recorded

# Fields by section that change neither the samples, nor their order, nor the training steps.
_OTHERWISE = {
    "data": " ".join(NOT_OF_THE_SAMPLES),
    "training": """micro_batch_size eval_global_batch_size empty_unused_memory_level eval_iters eval_interval
        full_validation multiple_validation_sets validation_set_names
        exit_interval exit_duration_in_mins deterministic_mode recompute_granularity
        recompute_modules recompute_method recompute_num_layers mlp_chunks_for_training manual_gc manual_gc_interval
        manual_gc_eval moe_record_routing""",
    "optimizer": "optimizer_backend store_param_remainders",
    "synchronization": "all_reduce_algorithm",
    "alarms": "",
    "adapters": "",
    "low_precision": "",
    "preferences": "reference_log_probabilities",
    "distillation": "distill_from distill_layout",
}
_OF_THE_MODEL = """hidden_dropout attention_dropout moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_bias_update_rate moe_router_quantile_balancing_ema moe_expert_capacity_factor moe_token_drop_policy
    mtp_loss_scaling_factor mtp_detach_heads"""
# `check_compatible` compares the other fields of the model.
_OF_THAT_RUN = "about that run alone: a new run has its own flags"
_OF_A_PROGRAM = "of a program's run (megalite.Trainer), which checks it when it continues"
_SECTIONS_OF_A_PROGRAM = "schedules", "optimizers"
_OF_ITS_STATE = "of the run's state, with which a run goes on that continues it"
_SECTIONS_OF_STATE = (
    *("alarm_history", "base", "data_parallel_shares", "left_out_samples", "unfinished_step", "data_mix"),
    *(PARENTS, "merged", "teacher"),
)
_UNKNOWN = "unknown to this version of megalite, and not read"
_SHOWN = 8


@dataclass(frozen=True)
class Loaded:
    """Report on what a run has loaded; empty if it starts fresh."""

    notes: tuple[str, ...] = ()
    records: Recorded | None = None
    """Records that `metrics.jsonl` must contain when the run resumes; None if there is nothing to check."""
    decisions: Sequence[Decision] = ()
    """Lines for the ledger of a run that has just begun with the checkpoint."""


def expected_records(config: TaskConfig, described: Manifest, *, has_validation: bool) -> Recorded:
    """Return which metrics records a run had written by the time of its checkpoint `described`."""
    settings, saved, state = config.checkpoint, described.config.get("training", {}), described.training
    interval = config.training.eval_interval
    due = has_validation and (state.iteration % interval == 0 or saved.get("train_iters") == state.iteration)
    as_before = saved.get("eval_interval") == interval and saved.get("eval_iters") != 0
    return Recorded(
        state.iteration,
        from_first=PARENTS not in described.config and (settings.load is None or settings.loads_where_it_saves),
        evaluated=due and as_before and not state.evaluation_left,
    )


def load_notes(
    saved: Mapping[str, Any], config: TaskConfig, state: TrainingState, *, position: bool, optimizer: bool
) -> tuple[str, ...]:
    """Return a line on which parts of the checkpoint were restored, and a line for each flag that differs.

    Args:
        saved: the checkpoint's configuration.
        state: the checkpoint's training state.
        position: True if step and consumed samples were restored.
        optimizer: True if the optimizer state was restored.
    """
    without = None if optimizer else "a new one by --no-load-optim" if position else "a new one by --finetune"
    anew = None if position else "a new run by --finetune"
    dynamic = config.training.fp16 and config.training.loss_scale is None
    parts = {
        "weights": None,
        f"optimizer state ({state.optimizer_steps} updates)": without,
        f"position (step {state.iteration}, {state.consumed_samples} samples)": anew,
        "metrics (cut off after that step)": anew,
    }
    if state.loss_scale is not None:
        parts[f"loss scale ({state.loss_scale['value']:g})"] = without if dynamic else "none is dynamic here"
    elif dynamic:
        parts["loss scale"] = "the checkpoint has none"
    restored = [name for name, reason in parts.items() if reason is None]
    ignored = [f"{name}: {reason}" for name, reason in parts.items() if reason is not None]
    line = f"restored: {', '.join(restored)}" + (f"; ignored: {', '.join(ignored)}" if ignored else "")
    return (line, *(differences(saved, config) if position else ()))


def rate_change(
    path: AnyPath,
    saved: Mapping[str, Any],
    here: LearningRateSchedule,
    consumed_samples: int,
    saved_samples: int,
    hidden_size: int,
) -> tuple[str, ...]:
    """Return a line if the schedule `here` continues with another learning rate than the run that saved `path`.

    `consumed_samples` counts samples of this run, `saved_samples` those of that one, which may have another length.
    """
    with suppress(CheckpointError):  # the rest of the checkpoint is good without these sections
        training = saved_section(path, saved, TrainingConfig)
        optimizer, batch_size = saved_section(path, saved, OptimizerConfig), training.global_batch_size
        if batch_size is None:
            return ()
        rates = rate_schedules(optimizer, training, hidden_size=hidden_size, global_batch_size=batch_size)
        there, rate = rates.learning_rate, here.at(consumed_samples)
        if not math.isclose(there.at(saved_samples), rate, rel_tol=0.01):
            last = there.at(max(saved_samples - batch_size, 0))
            return (f"note: learning rate {last:.3g} -> {rate:.3g}: the schedule differs from that of the last step",)
    return ()


def rounding_notes(opened: OpenedModel, dtype: torch.dtype) -> tuple[str, ...]:
    """Return a note if the weights are rounded to the precision of this run."""
    kinds = (kind for name, kind in opened.source.tensors.items() if not name.startswith(STATE))
    wider = {kind.dtype for kind in kinds if torch.promote_types(kind.dtype, dtype) != dtype}
    if not wider:
        return ()
    saved = ", ".join(sorted(map(dtype_name, wider)))
    return (f"note: {opened.what} has weights in {saved}, rounded to {dtype_name(dtype)}; master weights keep more",)


def differences(saved: Mapping[str, Any], config: TaskConfig) -> tuple[str, ...]:
    """Return a line for each field that affects the data, their order or the training, and differs from `saved`.

    A field that `saved` lacks is left out; one that this version of the program lacks has a note.
    """
    ours = json.loads(json.dumps(asdict(config)))
    compared = {
        section: [name for name in ours[section] if _is_compared(section, name)]
        for section in ("model", *_OTHERWISE)
        if section in ours and not (section == "optimizer" and "optimizers" in saved)
    }
    lines = (
        _difference(f"--{name.replace('_', '-')}", ours[section][name], before)
        for section, names in compared.items()
        for name in names
        if (before := saved.get(section, {}).get(name, ours[section][name])) != ours[section][name]
    )
    return (*lines, *_unknown(saved, ours))


def optimizer_differences(optimizer: str, saved: Mapping[str, Any], config: OptimizerConfig) -> tuple[str, ...]:
    """Return a line for each field of one of several optimizers that differs from `saved`, its section."""
    ours = json.loads(json.dumps(asdict(config)))
    changed = [name for name in ours if saved.get(name, ours[name]) != ours[name]]
    return tuple(_difference(f"{name} of {optimizer}", ours[name], saved[name]) for name in changed)


def _difference(what: str, here: Any, before: Any) -> str:
    return f"note: {what} is {_shown(here)} here, and was {_shown(before)} in the run that saved the checkpoint"


def option_fates(saved: Mapping[str, Any]) -> dict[str, list[KeyFate]]:
    """Return the fates of a checkpoint's options in a run that loads it, by section: what the functions above do."""
    known = {section: get_type_hints(kind) for section, kind in section_types().items()}
    of_tokenizer = {each.name for each in fields(TokenizerFlags)}
    found: dict[str, list[KeyFate]] = {}
    for section, values in saved.items():
        of_a_program = section in _SECTIONS_OF_A_PROGRAM or (
            section in ("model", "data") and "kind" in saved.get("model", {})
        )
        compared = {name for name in known.get(section, {}) if _is_compared(section, name)}
        for name in values if isinstance(values, Mapping) else ():
            fate = KeyFate(name, "noted", _OF_THAT_RUN)
            if of_a_program:
                fate = KeyFate(name, "used", _OF_A_PROGRAM)
            elif section in _SECTIONS_OF_STATE:
                fate = KeyFate(name, "used", _OF_ITS_STATE)
            elif name not in known.get(section, {}):
                fate = KeyFate(name, "refused" if section == "model" else "noted", _UNKNOWN)
            elif section == "model" and name not in NOT_THE_FUNCTION:
                fate = KeyFate(name, "used", "the network, which a run must have too; --use-checkpoint-args takes it")
            elif section == "adapters" and name != "lora_dropout":
                fate = KeyFate(name, "used", "what is trained, which a run that continues must have too")
            elif name in of_tokenizer:
                fate = KeyFate(name, "used", "the tokenizer of generation, evaluation and --use-checkpoint-args")
            elif name in compared:
                fate = KeyFate(name, "noted", "a run that resumes has its own flag, and says if it differs")
            found.setdefault(section, []).append(fate)
    return found


def _is_compared(section: str, name: str) -> bool:
    if section == "model":
        return name in _OF_THE_MODEL.split()
    return section in _OTHERWISE and name not in _OTHERWISE[section].split()


def _unknown(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on the saved options that this version does not have; none if there are no such."""
    names = [
        f"{section}.{name}"[:80]
        for section, values in saved.items()
        if section in ours or section not in (*section_types(), *_SECTIONS_OF_A_PROGRAM, *_SECTIONS_OF_STATE)
        for name in (values if isinstance(values, Mapping) else ())
        if name not in ours.get(section, {})
    ]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (f"note: the checkpoint's options {shown} are {_UNKNOWN}",) if names else ()


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value))[:200] or "unset"
    return "unset" if value is None else str(value)[:200]
