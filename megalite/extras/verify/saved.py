"""Checkpoints of any program: weights, the optimizer's state where it is saved by parameter, and the step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megalite.checkpoint.compatibility import saved_section
from megalite.checkpoint.directory import resolve
from megalite.checkpoint.manifest import MODEL, OPTIMIZER
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensors import Source
from megalite.config.adapters import AdaptersConfig
from megalite.config.checkpoint import checkpoints_in
from megalite.config.near_checkpoints import no_checkpoint
from megalite.conversion.huggingface import open_huggingface
from megalite.conversion.megatron import open_megatron, read_arguments
from megalite.conversion.megatron_arguments import count_of
from megalite.conversion.megatron_torch_dist import TorchDist
from megalite.conversion.native import open_megalite
from megalite.conversion.opened import OpenedModel, Renamed
from megalite.errors import CheckpointError
from megalite.restricted_pickle import StoredTensor
from megalite.small_files import is_count

MASTER = "master"
_MEGATRONS = {"param": MASTER, "fp32_param": MASTER, **{name: name for name in ("exp_avg", "exp_avg_sq")}}
_MEGATRONS["momentum_buffer"] = "momentum_buffer"
"""Names of state in Megatron-LM's checkpoints, and here."""


@dataclass(frozen=True)
class Saved:
    """Checkpoint that is open for reading.

    Attributes:
        weights: the network and its weights, as they were saved.
        states: the optimizer's state by name (master, exp_avg, exp_avg_sq, momentum_buffer), each by logical name.
        iteration: steps of the run so far; None if the checkpoint does not say it.
        consumed_samples: samples so far; None if the checkpoint does not say it.
        updates: updates so far, without skipped steps; None if the checkpoint does not say it.
        notes: lines on what is not there.
    """

    weights: OpenedModel
    states: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}))
    iteration: int | None = None
    consumed_samples: int | None = None
    updates: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Format and folder, for messages."""
        return self.weights.what

    @property
    def precise(self) -> OpenedModel:
        """The network with its master weights, if they are there, otherwise with its weights."""
        masters = self.states.get(MASTER)
        if masters is None:
            return self.weights
        return replace(self.weights, source=_Both(masters, self.weights.source))


class _Both:
    """Tensors of a source, and those of another one that it lacks (a `Source`)."""

    def __init__(self, first: Source, rest: Source) -> None:
        self._of = {name: source for source in (rest, first) for name in source.tensors}
        self.tensors = {name: source.tensors[name] for name, source in self._of.items()}

    def fill(self, name: str, box: Any, values: torch.Tensor) -> None:
        self._of[name].fill(name, box, values)


def open_saved(path: Path) -> Saved:
    """Open a checkpoint of megalite, Megatron-LM or Hugging Face, or the latest one of a run directory.

    The vocabulary of Megatron-LM's is the padded one, whose logits count in its softmax. Raises CheckpointError if
    there is none, or if megalite does not compute its network.
    """
    if (path / "config.json").is_file():
        return Saved(open_huggingface(path), notes=(f"{path} has weights alone",))
    found = checkpoints_in(path)
    if found == "megalite":
        return _of_megalite(path)
    if found == "megatron":
        return _of_megatron(path)
    raise CheckpointError(no_checkpoint(str(path), "--checkpoint"))


def _of_megalite(path: Path) -> Saved:
    """Open a checkpoint of megalite. Raises CheckpointError if it has adapters."""
    reader = CheckpointReader(resolve(path))
    if saved_section(reader.path, reader.manifest.config, AdaptersConfig).lora_rank is not None:
        raise CheckpointError(f"{reader.path} has adapters, which are not computed: verify a step without them")
    weights, training = open_megalite(path), reader.manifest.training
    states: dict[str, dict[str, str]] = {}
    for name in reader.tensors:
        if found := re.fullmatch(rf"{OPTIMIZER}(\w+)/(.+)", name):
            states.setdefault(found[1], {})[found[2]] = name
    weighted = {name.removeprefix(MODEL) for name in reader.tensors if name.startswith(MODEL)}
    sources = {state: Renamed(reader, names) for state, names in states.items() if weighted >= names.keys()}
    counts = training.iteration, training.consumed_samples, training.optimizer_steps
    return Saved(weights, sources, *counts, notes=() if sources else (f"{reader.path} has weights alone",))


def _of_megatron(path: Path) -> Saved:
    """Open a checkpoint of Megatron-LM, with the optimizer's state if it is saved by parameter."""
    folder, opened, arguments = read_arguments(path)
    rows = count_of(arguments, "padded_vocab_size")
    weights = open_megatron(folder, rows)
    common = opened.common()
    iteration, consumed = common.get("iteration"), arguments.get("consumed_train_samples")
    states: dict[str, Source] = {}
    notes = []
    for state in sorted(opened.states if isinstance(opened, TorchDist) else ()):
        if state in _MEGATRONS:
            try:
                states[_MEGATRONS[state]] = open_megatron(folder, rows, state).source
            except CheckpointError as error:
                notes.append(f"{state} is left out: {error}")
    if not states:
        notes.append(
            f"only weights of {folder} can be read: its optimizer's state is not saved by parameter, as it is with "
            "--ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"
        )
    return Saved(
        weights,
        states,
        iteration if is_count(iteration) else None,
        consumed if is_count(consumed) else None,
        next(_steps(common.get("optimizer"), depth=5), None),
        tuple(notes),
    )


def _steps(state: object, depth: int) -> Iterator[int]:
    """Yield the counts of updates within the optimizer's common state."""
    if isinstance(state, Mapping):
        for key in ("step", "common_step"):
            value = state.get(key)
            value = value.read().item() if isinstance(value, StoredTensor) and value.shape == () else value
            if isinstance(value, int | float) and 0 <= value < 2**53 and value == int(value):
                yield int(value)
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    for value in inner if depth else ():
        yield from _steps(value, depth - 1)
