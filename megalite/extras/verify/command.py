"""A training command as a configuration: for its own layout, and for the same run on one process."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal

from megalite.config import CheckpointConfig, ParallelConfig, RunConfig, parse_arguments, resolve
from megalite.config.alarms import AlarmsConfig
from megalite.config.command_line import flag_groups
from megalite.config.corruption import CorruptionConfig
from megalite.config.fields import flag_of, given, with_defaults
from megalite.config.kernels import KernelsConfig
from megalite.config.low_precision import LowPrecisionConfig
from megalite.config.megatron_flags import CALCULATE_PER_TOKEN_LOSS
from megalite.config.monitoring import LoggingConfig, ProfilingConfig, WatchdogConfig
from megalite.config.offload import OffloadConfig
from megalite.config.parse import settle
from megalite.config.recovery import RecoveryConfig
from megalite.config.reporting import ReportingConfig
from megalite.config.run import fields_by_name
from megalite.config.synchronization import SynchronizationConfig
from megalite.config.yaml_file import Sections
from megalite.errors import ConfigurationError
from megalite.extras.translation.report import Report
from megalite.extras.translation.source import translate, translate_command
from megalite.extras.verify.saved import open_saved
from megalite.model.router import BALANCING_LOSSES, Z_LOSS
from megalite.parallel.mesh import ParallelMesh

Program = Literal["megalite", "megatron"]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
OF_ROUTERS = frozenset({Z_LOSS, *(each.name for each in BALANCING_LOSSES.values())})
"""Names of the terms of the loss that routers give, which Megatron-LM may scale by other counts than the main one."""
_WITHOUT_NUMBERS: Mapping[str, Any] = {
    "checkpoint": CheckpointConfig(),
    "logging": LoggingConfig(report=False),
    "reporting": ReportingConfig(),
    "profiling": ProfilingConfig(),
    "watchdog": WatchdogConfig(watchdog=False),
    "recovery": RecoveryConfig(),
    "corruption": CorruptionConfig(),
    "alarms": AlarmsConfig(),
    "offload": OffloadConfig(),
    "kernels": KernelsConfig(),
}
"""Sections that change no number of a step beyond rounding, with what they are on one process."""
_NOT_OF_A_STEP = [
    "recompute_granularity",
    "recompute_modules",
    "recompute_method",
    "recompute_num_layers",
    "mlp_chunks_for_training",
    "eval_iters",
    "eval_interval",
    "full_validation",
    "multiple_validation_sets",
    "validation_set_names",
    "eval_global_batch_size",
    "exit_interval",
    "exit_duration_in_mins",
    "manual_gc",
    "manual_gc_interval",
    "manual_gc_eval",
    "rerun_mode",
    "moe_record_routing",
    "empty_unused_memory_level",
]
"""Fields of the training that change no number of a step."""
_OF_LOSS_SCALE = ["loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"]
_NARROW = [
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
]


@dataclass(frozen=True)
class Command:
    """A run as its command describes it.

    Attributes:
        config: the run, resolved for the ranks of the command, without what changes no number.
        program: the program whose rules hold where flags leave them open.
        world_size: the number of ranks.
        per_token_loss: whether a step differentiates the mean over the tokens of its global batch. If not, it is the
            mean of the micro-batches' means, which is another one only if some tokens count in no loss.
        settings: other fields that the command sets, such as finetune and log_interval.
        notes: what was assumed or left out, a line each.
    """

    config: RunConfig
    program: Program
    world_size: int
    per_token_loss: bool
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of ranks by axis: tp, pp, cp, dp, ep, etp and edp."""
        mesh = self.config.parallel.mesh_sizes
        axes = {
            "tp": mesh["tensor_parallel_size"],
            "pp": mesh["pipeline_parallel_size"],
            "cp": mesh["context_parallel_size"],
            "ep": mesh["expert_parallel_size"],
            "etp": mesh["expert_tensor_parallel_size"],
        }
        axes["dp"] = self.world_size // (axes["tp"] * axes["pp"] * axes["cp"])
        return axes | {"edp": self.world_size // (axes["ep"] * axes["etp"] * axes["pp"])}

    @property
    def balances_so_far(self) -> bool:
        """True if the balancing loss of the global batch takes the choices of the step so far, as in Megatron-LM."""
        return self.program == "megatron" and "global_aux_loss" in self.config.model.moe_router_load_balancing_type

    def coordinates(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the place of a rank on each axis, and the axis's number of ranks; empty if there is no such rank."""
        if not 0 <= rank < self.world_size:
            return {}
        mesh, sizes = ParallelMesh(world_size=self.world_size, **self.config.parallel.mesh_sizes), self.sizes
        return {axis: (at, sizes[axis]) for axis, at in mesh.coordinates_of(rank).items() if axis in sizes}

    @property
    def precision(self) -> Precision:
        """The precision of the run."""
        training = self.config.training
        return "bf16" if training.bf16 else "fp16" if training.fp16 else "fp64" if training.fp64 else "fp32"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step over all ranks, after any growth of the batch."""
        training = self.config.training
        return (training.global_batch_size or training.micro_batch_size) // training.micro_batch_size

    @property
    def counts(self) -> dict[str, int]:
        """Numbers above 1 by which figures and gradients are multiplied or divided by mistake, with what they count."""
        sizes = self.sizes
        found = {
            "the tensor-parallel ranks": sizes["tp"],
            "the data-parallel ranks": sizes["dp"],
            "the context-parallel ranks": sizes["cp"],
            "the pipeline stages": sizes["pp"],
            "the expert-parallel ranks": sizes["ep"],
            "the micro-batches of a rank": self.micro_batches // sizes["dp"],
            "the micro-batches of a step": self.micro_batches,
            "all ranks": self.world_size,
        }
        counts = {name: count for name, count in found.items() if count > 1}
        return counts if 2 in counts.values() else counts | {"two": 2}


def named_factors(counts: Mapping[str, float]) -> dict[float, str]:
    """Return counts as factors and divisors, and then their roots, each with what is counted."""
    found: dict[float, tuple[str, list[str]]] = {}
    for words, power in (
        ("times", 1.0),
        ("divided by", -1.0),
        ("times the root of", 0.5),
        ("divided by the root of", -0.5),
    ):
        for said, count in counts.items():
            text, names = found.setdefault(round(count**power, 12), (f"{words} {count:g}", []))
            if text == f"{words} {count:g}":
                names.append(said)
    return {factor: f"{text} ({', '.join(names)})" for factor, (text, names) in found.items()}


def read_command(
    command: str,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    ranks: int | None = None,
    checkpoint: Path | None = None,
    program: Program | None = None,
) -> Command:
    """Read a command, which is never executed.

    Args:
        command: the file of a launch script, or the command itself, or only its flags.
        variables: values of the script's variables.
        ranks: the number of ranks, if the command does not say it.
        checkpoint: the network is taken from it if flags do not describe it.
        program: the program that the command starts; None: the one that its name tells.

    Raises:
        ConfigurationError: the command cannot be read, or describes no run, or one whose steps are not computed; the
            message says what is missing.
        CheckpointError: the checkpoint is needed and cannot be read.
    """
    report = _report(command, variables, ranks)
    flags, settings = _of_the_numbers(report.flags)
    notes = [f"not computed: {line}" for line in report.refused] + report.notes
    dropped = {flag_of(name) for name in settings}
    needed = [line for line in report.missing if not any(f"{flag} needs" in line for flag in dropped)]
    if ranks is not None:
        needed = [line for line in needed if "--ranks" not in line]
    if needed:
        raise ConfigurationError("\n".join(needed))
    takes_saved = checkpoint is not None and (
        settings.get("use_checkpoint_args") or not {"--num-layers", "--hybrid-layer-pattern"} & set(flags)
    )
    if takes_saved and checkpoint is not None:
        flags += ["--load", str(checkpoint), "--use-checkpoint-args"]
        parsed = parse_arguments(flags, lambda loading, tokenizer: _saved_sections(checkpoint, tokenizer))
        notes.append(f"the network is that of {checkpoint}")
    else:
        parsed = parse_arguments(flags)
    config = replace(parsed.config, checkpoint=CheckpointConfig())
    for flag in (*given(config.adapters, "lora_rank freeze"), *given(config.distillation, "distill_from")):
        raise ConfigurationError(
            f"{flag}: neither steps that train a part of a network nor teachers are computed: verify a step without it"
        )
    world_size = report.world_size or ranks
    if world_size is None:
        world_size = config.parallel.ranks_needed
        notes.append(f"ranks: {world_size}, the least that the layout needs; the command does not say how many")
    if program is None:
        # No other program has these flags.
        only = bool(config.data.loss_weights) or config.data.data_mix_schedule is not None
        program = "megalite" if only or PurePath(report.program).name.startswith("megalite") else "megatron"
    if config.data.mock_data and program != "megalite":
        notes.append("--mock-data: the samples are those that megalite makes up, and other programs make up others")
    notes += [f"not computed: {flag}: products are not rounded" for flag in given(config.low_precision, "*")]
    config = replace(config, low_precision=LowPrecisionConfig())
    per_token = program == "megalite" or f"--{CALCULATE_PER_TOKEN_LOSS}" in flags
    config = resolve(config, world_size)
    return Command(config, program, world_size, per_token, settings, tuple(notes))


def _report(command: str, variables: Mapping[str, str], ranks: int | None) -> Report:
    """Return the translation of a file, of a command, or of flags alone."""
    command = re.sub(r"\s*\\?\n\s*(?=--)", " ", command.strip())  # flags on lines of their own
    if command.startswith("--"):
        if re.search(r"[$`;&|<>()]", command):
            return translate_command(f"python pretrain_gpt.py {command}", variables, ranks)
        report = Report(whole=True)
        report.add_megatron(shlex.split(command))
        return report
    if os.path.isfile(command) or not re.search(r"\s", command):
        return translate(command, variables, ranks)
    return translate_command(command, variables, ranks)


def _of_the_numbers(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the flags that decide numbers of a step, and the fields that the other ones set."""
    flags: list[str] = []
    settings: dict[str, Any] = {}
    places = fields_by_name()
    for flag, values in flag_groups(argv):
        fields, _ = settle(flag, values)
        if fields and all(places[name].section in _WITHOUT_NUMBERS for name in fields):
            settings |= fields
        else:
            flags += [f"--{flag}", *values]
    return flags, settings


def _saved_sections(checkpoint: Path, tokenizer: str | None) -> Sections:
    """Return the fields of the network and the tokenizer in a checkpoint."""
    opened = open_saved(checkpoint).weights
    model = asdict(opened.config)
    if (tokenizer or opened.data.get("tokenizer_type")) == "NullTokenizer":
        model["vocab_size"] -= 1  # a NullTokenizer adds the end-of-document token
    return {"model": model, "data": {} if tokenizer else dict(opened.data)}


def one_process(command: Command, precision: Precision) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run on one process in a precision, and lines on what is not as the command says.

    The samples, the batches and the update rule stay. What only the layout, speed, logs and files need is left out.
    """
    config, notes = command.config, []
    parallel = ParallelConfig(grad_reduce_in_bf16=config.parallel.grad_reduce_in_bf16 and precision == "bf16")
    left_out = (*_NOT_OF_A_STEP, *(() if precision == "fp16" else _OF_LOSS_SCALE))
    of_precision: dict[str, Any] = {name: precision == name for name in ("bf16", "fp16", "fp64")}
    training = replace(with_defaults(config.training, left_out), eval_iters=0, **of_precision)
    optimizer = replace(config.optimizer, optimizer_backend="auto")
    if precision in ("fp64", "fp32"):
        optimizer = with_defaults(optimizer, _NARROW)
    model = config.model
    if command.program != "megalite" and (model.hidden_dropout or model.attention_dropout):
        notes.append("dropout is left out: the random numbers of other programs cannot be drawn again")
        model = replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    if not config.synchronization.is_plain:
        notes.append("gradients are summed over all ranks in each step: other synchronization is not computed")
    if config.low_precision.recipe is not None:
        notes.append(f"products are not rounded: {config.low_precision.flag} is not computed")
    config = replace(
        config,
        model=model,
        parallel=parallel,
        synchronization=SynchronizationConfig(),
        low_precision=LowPrecisionConfig(),
        optimizer=optimizer,
        training=training,
        data=replace(config.data, num_workers=0),
        **_WITHOUT_NUMBERS,
    )
    return resolve(config, 1), tuple(notes)
