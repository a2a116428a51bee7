"""Configuration of a run: the sections of all concerns."""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megalite.config.adapters import AdaptersConfig
from megalite.config.alarms import AlarmsConfig
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.corruption import CorruptionConfig
from megalite.config.data import DataConfig
from megalite.config.distillation import DistillationConfig
from megalite.config.kernels import KernelsConfig
from megalite.config.low_precision import LowPrecisionConfig
from megalite.config.model import ModelConfig
from megalite.config.monitoring import LoggingConfig, ProfilingConfig, WatchdogConfig
from megalite.config.offload import OffloadConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.preferences import PreferenceConfig
from megalite.config.recovery import RecoveryConfig
from megalite.config.reporting import ReportingConfig
from megalite.config.synchronization import SynchronizationConfig
from megalite.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Configuration of a run of any task: all but its network and its data."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout over ranks."""
    synchronization: SynchronizationConfig = field(default_factory=SynchronizationConfig)
    """Data parallelism that communicates less."""
    optimizer: OptimizerConfig
    """The update rule and the learning rate."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """State and activations in the host's memory."""
    training: TrainingConfig
    """Batches, length, evaluation, precision."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """Implementation of fused operations, compilation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Screen, metrics, TensorBoard."""
    reporting: ReportingConfig = field(default_factory=ReportingConfig)
    """Further places that get the metrics."""
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    """Measurement of time and memory."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """Watchdog for a run that hangs."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """Restart of ranks that fail, within the job."""
    corruption: CorruptionConfig = field(default_factory=CorruptionConfig)
    """Search for silent corruption."""
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    """Alarms about steps that look wrong."""

    @property
    def is_monitored(self) -> bool:
        """True if something watches the run after its steps."""
        return self.logging.memory_monitor or self.logging.performance_monitor


@dataclass(frozen=True, kw_only=True)
class RunConfig(TaskConfig):
    """Configuration of a run that pre-trains a GPT."""

    model: ModelConfig
    """The network."""
    data: DataConfig
    """Samples and tokenizer."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """A teacher, a larger model to learn from."""
    preferences: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Training on pairs of responses."""
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    """Adapters and frozen weights."""
    low_precision: LowPrecisionConfig = field(default_factory=LowPrecisionConfig)
    """Matrix products in 8 and in 4 bits."""


_ORDER = ("model", "parallel", "data")  # the first sections; the others follow in the order of `TaskConfig`


@dataclass(frozen=True)
class FieldPlace:
    """Place of a field: its section, its type, and whether it is required."""

    section: str
    kind: Any
    required: bool


@cache
def section_types() -> dict[str, Any]:
    """Return the section names of `RunConfig`, in order, with their dataclasses."""
    kinds = get_type_hints(RunConfig)
    return {name: kinds[name] for name in dict.fromkeys((*_ORDER, *kinds))}


@cache
def fields_by_name() -> dict[str, FieldPlace]:
    """Return every field of every section by its name; all names are different."""
    places = {}
    for section, section_type in section_types().items():
        kinds = get_type_hints(section_type)
        for entry in fields(section_type):
            places[entry.name] = FieldPlace(section, kinds[entry.name], entry.default is MISSING)
    return places


def fits(value: object, kind: Any) -> bool:
    """Tell whether a JSON value is valid for a field of this type."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return value is None or fits(value, options[0])
    if origin is Literal:
        return value in options
    if origin is tuple:
        of_length = options[-1] is Ellipsis or (isinstance(value, list | tuple) and len(value) == len(options))
        return of_length and isinstance(value, list | tuple) and all(fits(each, options[0]) for each in value)
    if kind is float:
        return type(value) is int or (type(value) is float and math.isfinite(value))
    return type(value) is kind
