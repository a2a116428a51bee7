"""Classes of devices that are not alike: `--device-classes FILE`, the class of each rank, and what it may change.

FILE is TOML with a table for each class, in the order of the nodes (docs/planner.md). The configuration of a run keeps
its text in place of its path, so that all ranks, `config.yaml` and a resumed run have the same classes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from megalite.config import ParallelConfig, RunConfig
from megalite.config.fields import flag_of
from megalite.config.run import TaskConfig, fields_by_name, fits
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import Cluster, find_cluster, known_clusters
from megalite.small_files import MIB, parse_toml, read_small_file, reason, shown

FLAG = "--device-classes"
_MOST_GPUS = 1_000_000
_LARGEST = MIB
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_FRACTION = "optimizer_offload_fraction"
OVERRIDES = (*_RECOMPUTATION, _FRACTION)
"""Flags that a class may give: none changes a number of the result."""
_FIGURES = ("memory_gib", "tflops", "memory_gb_per_s", "node_gb_per_s", "network_gb_per_s")
_KEYS = ("gpu", "nodes", "gpus_per_node", *_FIGURES, "flags")
_CONSTANTS = "H100-SXM"
"""GPU whose constants of kernels, such as their share of the peak, a class has that names none."""
_BY_ELEMENT = ("adam", "sgd", "lion")


@dataclass(frozen=True)
class DeviceClass:
    """Devices that are alike, on nodes that follow each other."""

    name: str
    cluster: Cluster
    """One node after another of this class, as if there were no other."""
    ranks: int
    flags: tuple[tuple[str, Any], ...] = ()
    """Flags that its ranks have in place of the run's, by the names of their fields."""

    @property
    def speed(self) -> float:
        """FLOP/s of large products in 16 bits."""
        return self.cluster.gpu.half_peak * self.cluster.gpu.efficiency

    @property
    def room(self) -> float:
        """Bytes of a device."""
        return self.cluster.gpu.memory

    def room_line(self, peak: float) -> str:
        """Return, as text, whether a device has room for the peak of a step, beside what its driver takes."""
        size, room = (peak + self.cluster.gpu.reserved) / 2**30, self.room / 2**30
        return f"class {self.name}: needs {size:.1f} of {room:.1f} GiB" + ("" if size <= room else ", and does not fit")

    def on(self, config: TaskConfig) -> Any:
        """Return the configuration of its ranks. One that gives --recompute-granularity gives all of recomputation."""
        given = dict(self.flags)
        if "recompute_granularity" in given:
            kind = type(config.training)
            given = {name: getattr(kind, name) for name in _RECOMPUTATION} | given
        sections: dict[str, dict[str, Any]] = {}
        for name, value in given.items():
            sections.setdefault(fields_by_name()[name].section, {})[name] = value
        return replace(config, **{name: replace(getattr(config, name), **each) for name, each in sections.items()})


@dataclass(frozen=True)
class DeviceClasses:
    """The classes of a run, in the order of its ranks."""

    classes: tuple[DeviceClass, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(each.ranks for each in self.classes))

    @property
    def world_size(self) -> int:
        return self._ends[-1]

    def of(self, rank: int) -> DeviceClass:
        """Return the class of a rank."""
        return self.classes[bisect_right(self._ends, rank)]

    def among(self, ranks: range) -> tuple[DeviceClass, ...]:
        """Return the classes that consecutive ranks have, in order."""
        return self.classes[bisect_right(self._ends, ranks[0]) : bisect_right(self._ends, ranks[-1]) + 1]

    def of_pipeline_rank(self, rank: int, parallel: ParallelConfig) -> tuple[DeviceClass, ...]:
        """Return the classes of the devices that have a pipeline rank's stages, in order."""
        size = self.world_size // parallel.pipeline_model_parallel_size
        return self.among(range(rank * size, (rank + 1) * size))

    def of_replica(self, replica: int, parallel: ParallelConfig) -> tuple[DeviceClass, ...]:
        """Return the slowest class of each pipeline rank of a data-parallel replica."""
        size = self.world_size // parallel.pipeline_model_parallel_size
        block = parallel.tensor_model_parallel_size * parallel.context_parallel_size
        firsts = (rank * size + replica * block for rank in range(parallel.pipeline_model_parallel_size))
        return tuple(min(self.among(range(first, first + block)), key=lambda one: one.speed) for first in firsts)


def data_parallel_speeds(layout: ParallelConfig) -> tuple[float, ...]:
    """Return the speed of each data-parallel rank, relative to the fastest one: that of the slowest device in its
    pipeline. The run has the text of its classes."""
    classes = classes_of(layout)
    replicas = range(layout.data_parallel_size(classes.world_size))
    speeds = [min(one.speed for one in classes.of_replica(replica, layout)) for replica in replicas]
    return tuple(speed / max(speeds) for speed in speeds)


# ------------------------------------------------------------------------------------------------------- a run


def with_device_classes(config: RunConfig, world_size: int) -> RunConfig:
    """Return a run that has the text of its file of classes in place of the path.

    Raises:
        ConfigurationError: the file cannot be read or has a mistake, or its classes do not fit the run.
    """
    given = config.parallel.device_classes
    assert given is not None
    text, where = given, f"{FLAG} (as it was saved)"
    if not _is_text(given):
        where = f"{FLAG} {given}"
        try:
            text = read_small_file(Path(given), largest=_LARGEST).decode()
            text += "" if _is_text(text) else "\n"
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{where} cannot be read: {reason(error)}") from None
    classes = _parsed(text, where)
    if classes.world_size != world_size:
        counted = " + ".join(f"{each.ranks} {each.name}" for each in classes.classes)
        raise ConfigurationError(
            f"{where}: nodes x gpus_per_node of its classes is {counted} = {classes.world_size} devices, but the run "
            f"has {world_size} ranks: make them equal"
        )
    config = replace(config, parallel=replace(config.parallel, device_classes=text))
    if world_size % config.parallel.ranks_needed == 0:  # otherwise `validate` says what is wrong
        for problem in _crossings(config, classes):
            raise ConfigurationError(f"{where}: {problem}")
    return config


def require_valid_classes(config: RunConfig, world_size: int) -> None:
    """Raise ConfigurationError if the flags of a class do not fit the others; names the class. `config`: with its
    stages written out."""
    for one in classes_of(config.parallel).classes:
        if one.flags:
            try:
                resolve(one.on(config), world_size)
            except ConfigurationError as error:
                raise ConfigurationError(f"{FLAG}: flags of {one.name}: {error}") from None


def classes_of(parallel: ParallelConfig) -> DeviceClasses:
    """Return the classes of a run that has their text."""
    assert parallel.device_classes is not None
    return _parsed(parallel.device_classes, FLAG)


def of_rank(config: TaskConfig, rank: int) -> TaskConfig:
    """Return the configuration of a rank: the run's, with the flags of the rank's class."""
    found: TaskConfig = classes_of(config.parallel).of(rank).on(config)
    return found


def _is_text(given: str) -> bool:
    """Tell the text of a file, as a run has saved it, from a path."""
    return "\n" in given


def _crossings(config: RunConfig, classes: DeviceClasses) -> Iterator[str]:
    """Yield what is wrong with the groups of ranks that have devices of several classes."""
    parallel, sizes = config.parallel, config.parallel.mesh_sizes
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    groups = [(tensor * context, f"TP {tensor} x CP {context}")]
    if config.model.num_experts is not None:
        experts, of_experts = sizes["expert_parallel_size"], sizes["expert_tensor_parallel_size"]
        groups.append((experts * of_experts, f"EP {experts} x ETP {of_experts}"))
    for size, axes in groups:
        for first in range(0, classes.world_size, size):
            found = classes.among(range(first, first + size))
            if len(found) == 1:
                continue
            words = f"ranks {first} to {first + size - 1} share each layer ({axes}), and are of several classes: "
            words += ", ".join(one.name for one in found)
            if not parallel.allow_mixed_groups:
                yield (
                    f"{words}. The faster ones would wait in each layer: give classes whose ranks are a multiple of "
                    f"{size}, or --allow-mixed-groups"
                )
            elif len({one.flags for one in found}) > 1:
                yield f"{words}. These must have the same flags: their collectives are repeated in recomputation"
    stages = [classes.of_pipeline_rank(rank, parallel) for rank in range(parallel.pipeline_model_parallel_size)]
    mixed = [pair for stage in stages for pair in pairwise(stage)]
    yield from _recomputation(config, mixed)
    yield from _fractions(config, mixed, stages[0][0], stages[-1][0])
    if any(one.flags for one in classes.classes) and not config.synchronization.is_plain:
        yield "flags of classes need data parallelism that sums all gradients in each step: leave them out"


def _recomputation(config: RunConfig, mixed: Sequence[tuple[DeviceClass, DeviceClass]]) -> Iterator[str]:
    """Yield where data-parallel ranks would repeat other collectives in their recomputation."""
    for one, other in mixed:
        differ = [name for name in _RECOMPUTATION if dict(one.flags).get(name) != dict(other.flags).get(name)]
        if not differ:
            continue
        why = ""
        if config.parallel.zero_stage == 3:
            why = "gathers of ZeRO 3 are"
        elif config.model.num_experts is not None:
            why = "exchanges of experts are"
        if why:
            yield (
                f"{one.name} and {other.name} have the same stages, and differ in {', '.join(map(flag_of, differ))}: "
                f"{why} repeated in recomputation. Give both the same, or put a border of pipeline stages between them"
            )


def _fractions(
    config: RunConfig, mixed: Sequence[tuple[DeviceClass, DeviceClass]], first: DeviceClass, last: DeviceClass
) -> Iterator[str]:
    """Yield where an element would be updated on a host by one rank, and on a device by another, with other bits."""

    def fraction(one: DeviceClass) -> float:
        found: float = one.on(config).offload.fraction_on_host
        return found

    parallel, optimizer = config.parallel, config.optimizer.optimizer
    differ = [pair for pair in mixed if fraction(pair[0]) != fraction(pair[1])]
    flag = flag_of(_FRACTION)
    for one, other in differ[:1]:
        words = f"{one.name} and {other.name} have the same stages, and differ in {flag}: "
        if parallel.zero_stage == 0:
            yield f"{words}each of their ranks would update all weights, with other rounding. Give ZeRO 1 or more"
        elif parallel.num_distributed_optimizer_instances > 1:
            yield f"{words}leave out --num-distributed-optimizer-instances, whose instances each update all weights"
        elif optimizer not in _BY_ELEMENT:
            yield f"{words}--optimizer {optimizer} updates tensors together. Give one of {', '.join(_BY_ELEMENT)}"
    tied = config.model.shares_embedding
    if tied and parallel.pipeline_model_parallel_size > 1 and fraction(first) != fraction(last):
        yield (
            f"the first stage ({first.name}) and the last ({last.name}) differ in {flag}, and both update the "
            "embedding: give both the same, or --untie-embeddings-and-output-weights without depths"
        )


# ------------------------------------------------------------------------------------------------------- the file


@cache
def _parsed(text: str, where: str) -> DeviceClasses:
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not TOML: {reason(error)}") from None
    if not tables:
        raise ConfigurationError(f"{where} has no class: give a table for each, such as [h100]")
    classes = tuple(_class(name, table, f"{where}: {shown(name)}") for name, table in tables.items())
    if (total := sum(each.ranks for each in classes)) > _MOST_GPUS:
        raise ConfigurationError(f"{where}: has {total} devices, and {_MOST_GPUS} are the most")
    return DeviceClasses(classes)


def _class(name: str, table: object, where: str) -> DeviceClass:
    """Read a class from its table. Raises ConfigurationError, which begins with `where`."""
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{where} is {shown(table)}: give a table for each class, such as [h100]")
    for key in table:
        if key not in _KEYS:
            raise ConfigurationError(f"{where}: {shown(key)} is unknown: keys are {', '.join(_KEYS)}")
    nodes, each = (_count(table, key, where) for key in ("nodes", "gpus_per_node"))
    figures = {key: _figure(table[key], key, where) for key in _FIGURES if key in table}
    gpu = table.get("gpu")
    if gpu is not None and gpu not in known_clusters():
        raise ConfigurationError(f"{where}: gpu is {shown(gpu)}: give one of {', '.join(known_clusters())}")
    if gpu is None and (missing := [key for key in _FIGURES if key not in figures]):
        raise ConfigurationError(f"{where}: without gpu, {', '.join(missing)} must be given")
    return DeviceClass(name, _cluster(name, gpu, figures, each), nodes * each, _flags(table.get("flags", {}), where))


def _cluster(name: str, gpu: str | None, figures: Mapping[str, float], gpus_per_node: int) -> Cluster:
    """Return a known cluster, or that of the constants, with figures in place of its own."""
    known = find_cluster(gpu or _CONSTANTS)
    changes: dict[str, Any] = {} if gpu is not None else {"name": name, "generation": None}
    if "memory_gib" in figures:
        changes["memory"] = figures["memory_gib"] * 2**30
    if "tflops" in figures:
        factor = figures["tflops"] * 1e12 / known.gpu.half_peak
        changes["peak"] = {dtype: peak * factor for dtype, peak in known.gpu.peak.items()}
    if "memory_gb_per_s" in figures:
        changes["bandwidth"] = figures["memory_gb_per_s"] * 1e9
    links = {
        link: replace(getattr(known, link), beta=1e-9 / figures[f"{link}_gb_per_s"])
        for link in ("node", "network")
        if f"{link}_gb_per_s" in figures
    }
    ranks = gpus_per_node if known.hosts == 1 else known.node_ranks  # a rack stays one
    return replace(known, name=name, gpu=replace(known.gpu, **changes), nodes=None, node_ranks=ranks, **links)


def _count(table: Mapping[str, Any], key: str, where: str) -> int:
    value = table.get(key)
    if type(value) is not int or not 1 <= value <= _MOST_GPUS:
        found = "is missing" if value is None else f"is {shown(value)}"
        raise ConfigurationError(f"{where}: {key} {found}: give a whole number, 1 or more")
    return value


def _figure(value: object, key: str, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e9:  # type: ignore[operator]
        raise ConfigurationError(f"{where}: {key} is {shown(value)}: give a number above 0")
    return float(value)  # type: ignore[arg-type]


def _flags(table: object, where: str) -> tuple[tuple[str, Any], ...]:
    """Read the flags of a class, by their names in order. Raises ConfigurationError for others than `OVERRIDES`."""
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{where}: flags is {shown(table)}: give a table, by the names of flags")
    found: list[tuple[str, Any]] = []
    for name, value in sorted(table.items()):
        if name not in OVERRIDES:
            raise ConfigurationError(
                f"{where}: flags cannot have {shown(name)}: classes may differ in {', '.join(OVERRIDES)}, which change "
                "no number of the result"
            )
        if name == "recompute_granularity" and value == "none":
            found.append((name, None))
            continue
        if not fits(value, fields_by_name()[name].kind):
            raise ConfigurationError(f"{where}: flags: {name} is {shown(value)}: give a value of {flag_of(name)}")
        kept: Any = tuple(value) if isinstance(value, list) else value
        found.append((name, float(kept) if name == _FRACTION else kept))
    return tuple(found)
