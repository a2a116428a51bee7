"""Comparison of a run with its reference, tensor by tensor, as an engineer compares two layouts of a model.

The tensors of the reference are put together from its ranks, and each recorded part of the run is compared with its
place in them. The relative distance of a right run may be 1e-3 in fp32 and 8e-2 in bf16, and that of a figure a
quarter of it: twice what right runs of 18 layouts have at most, or more. Nothing tells which of the two runs is wrong,
so the run is accused.

Places are those of the trace, or of Megatron-LM's rules: consecutive features over tp, tokens over cp in zigzag and
then over tp, samples over dp. What these do not place (tokens of experts) is not compared. Gradients of activations
may be dp x cp times as large, as they are where a program averages over ranks.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.extras.verify.evidence import Whole
from megalite.extras.verify.readers.own import read
from megalite.extras.verify.trace import Entry, Role
from museum.detectors.finding import Finding

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 1e-2}
"""Largest relative distance of tensors."""
OF_FIGURES = 0.25
"""Tolerance of figures in that of tensors: they are sums of many elements."""
OF_UPDATES = 20.0
"""Tolerance of updates in that of tensors: Adam divides small gradients by their own size."""
_SEQUENCE_FIRST = ("megatron", "megalite")
_FORWARD: tuple[Role, ...] = ("input", "output")
_BACKWARD: tuple[Role, ...] = ("input_gradient", "output_gradient")
_OF_WEIGHTS: tuple[Role, ...] = ("gradient", "main_gradient")
_Key = tuple[str, Role, int]
Indices = list[Tensor]
"""Places of a part's elements in a whole tensor, one index of each dimension after the other."""


def detect(case: Path) -> Finding:
    """Return the first tensor that differs, in the order in which the reference computes, or the first figure.

    Without whole tensors, it cannot be told.
    """
    runs = [_Run(case / name) for name in _RUNS]
    if not all(run.is_whole for run in runs):
        return Finding("unknown")
    pair = _Pair(*runs)
    found = next(pair.differences(), None) or next(_differences_of_files(case, pair.tolerance), None)
    return found or Finding("right")


_RUNS = ("run", "reference")


class _Run:
    """Trace of the first recorded step, and what is needed to place its tensors."""

    def __init__(self, folder: Path) -> None:
        self.trace = read(folder / "trace", None)
        command = (folder / "command.txt").read_text()
        self.groups = _flag(command, "num-query-groups")
        heads = _flag(command, "num-attention-heads")
        self.fused: dict[str, tuple[int, int]] = {"query_key_value": (heads, 2 * (self.groups or heads))}
        if "--swiglu" in command:
            self.fused |= {"linear_fc1": (1, 1), "mlp.up": (1, 1)}
        self.samples, self.length = self._batch() if self.trace.batches else (0, 0)
        self.entries: dict[_Key, list[Entry]] = defaultdict(list)
        for entry in sorted(self.trace.entries, key=lambda each: self.axis(each, "pp")):
            role: Role = "gradient" if entry.role == "main_gradient" else entry.role
            number = 0 if entry.place is not None and entry.place.offset is not None else entry.number
            self.entries[self._global_name(entry), role, number].append(entry)

    @property
    def is_whole(self) -> bool:
        """Tell whether the trace has tensors with their batch, not sketches."""
        return bool(self.trace.batches and self.trace.entries) and isinstance(self.trace.entries[0].read(), Whole)

    def axis(self, entry: Entry, name: str) -> tuple[int, int]:
        return self.trace.coordinates[entry.rank].get(name, (0, 1))

    def size(self, name: str) -> int:
        return max(axes.get(name, (0, 1))[1] for axes in self.trace.coordinates.values())

    @property
    def data(self) -> int:
        return self.size("dp") * self.size("cp")

    def _batch(self) -> tuple[int, int]:
        """Return the number of samples of a micro-batch, and of tokens of a sample."""
        samples, length = self.trace.batches[0].tokens.shape
        return samples, length * self.size("cp")

    def _global_name(self, entry: Entry) -> str:
        """Return the name with the number of an expert among those of all ranks."""
        found = re.fullmatch(r"(.*\.local_experts\.)(\d+)(\..*)", entry.name)
        if found is None:
            return entry.name
        names = [re.search(r"\.local_experts\.(\d+)\.", each.name) for each in self.trace.entries]
        count = 1 + max(int(each[1]) for each in names if each is not None)
        return f"{found[1]}{int(found[2]) + self.axis(entry, 'ep')[0] * count}{found[3]}"

    def whole(self, parts: Sequence[Entry], ratios: Sequence[int]) -> tuple[Tensor, list[tuple[Entry, Indices]]]:
        """Return a tensor put together from its parts (of copies, that of the lowest rank), and their places."""
        places = [(entry, self._indices(entry, ratios)) for entry in parts]
        sizes = [1 + max(int(indices[at].max()) for _, indices in places) for at in range(len(parts[0].shape))]
        found = torch.full(sizes, math.nan, dtype=torch.float64)
        for entry, indices in reversed(places):
            found[_grid(indices)] = values(entry)
        return found, places

    def _indices(self, entry: Entry, ratios: Sequence[int]) -> Indices:
        letters, offset = self.letters(entry), None if entry.place is None else entry.place.offset
        found = []
        for at, (size, ratio) in enumerate(zip(entry.shape, ratios, strict=True)):
            if offset is not None:
                found.append(offset[at] + torch.arange(size))
            elif letters[at : at + 1] == "b":
                index, count = self.axis(entry, "dp")
                found.append((entry.micro_batch * count + index) * size + torch.arange(size))
            elif letters[at : at + 1] == "s":
                found.append(self._tokens(entry, size))
            else:
                found.append(self._features(entry, size, ratio))
        return found

    def _tokens(self, entry: Entry, size: int) -> Tensor:
        """Return the places of a rank's tokens in their sample."""
        index, count = self.axis(entry, "cp")
        places = torch.arange(self.length)
        if size < self.length and count > 1:
            chunks = places.chunk(2 * count)
            places = torch.cat([chunks[index], chunks[2 * count - 1 - index]])
        return places if size == len(places) else places.split(size)[self.axis(entry, "tp")[0]]

    def _features(self, entry: Entry, size: int, ratio: int) -> Tensor:
        """Return the places of a rank's features, of which there are `ratio` times as many as here."""
        index, count = self.axis(entry, self.features_axis(entry))
        part = index * ratio // count
        module = entry.name.removesuffix(".weight").removesuffix(".bias")
        segments = next((each for name, each in self.fused.items() if module.endswith(name)), (1, 0))
        found, start = [], 0
        for share in segments:  # of each, a rank has its part
            own = size * share // sum(segments)
            found.append(start + part * own + torch.arange(own))
            start += own * ratio
        return torch.cat(found)

    def features_axis(self, entry: Entry) -> str:
        is_expert = ".experts." in entry.name and "etp" in self.trace.coordinates[entry.rank]
        return "etp" if is_expert else "tp"

    def shares_heads(self, entry: Entry) -> bool:
        """Tell whether several tensor-parallel ranks have the key-value heads of a tensor."""
        is_of_heads = (
            re.search(r"\.(k_proj|v_proj|k_norm|linear_qkv|k_layernorm|query_key_value)$", entry.name) is not None
        )
        return is_of_heads and self.groups > 0 and self.size("tp") > self.groups

    def letters(self, entry: Entry) -> str:
        """Return the meaning of the first two dimensions of an activation; an empty text if it has no tokens."""
        if entry.role not in (*_FORWARD, *_BACKWARD):
            return ""
        if entry.place is not None:
            return entry.place.dimensions
        return "sb" if self.trace.program in _SEQUENCE_FIRST else "bs"

    def is_placed(self, entry: Entry) -> bool:
        """Tell whether the dimensions of an activation have the sizes that their meaning asks for."""
        letters = self.letters(entry)
        if entry.role not in (*_FORWARD, *_BACKWARD):
            return True
        if len(entry.shape) < 3 or entry.micro_batch < 0 or not letters or (entry.place and entry.place.partial):
            return False
        sizes = dict(zip(letters[:2], entry.shape[:2], strict=True))
        of_rank = self.length // self.size("cp")
        return sizes["b"] == self.samples and sizes["s"] in (self.length, of_rank, of_rank // self.size("tp"))


def _flag(command: str, name: str) -> int:
    """Return the number after a flag of a command; 0 if it is not there."""
    found = re.search(rf"--{name} (\d+)", command)
    return int(found[1]) if found else 0


def values(entry: Entry) -> Tensor:
    """Return the recorded values in fp64."""
    evidence = entry.read()
    assert isinstance(evidence, Whole)
    return evidence.values.double()


def _grid(indices: Indices) -> tuple[Tensor, ...]:
    return tuple(torch.meshgrid(*indices, indexing="ij"))


class _Pair:
    """Step of a run and of its reference."""

    def __init__(self, run: _Run, reference: _Run) -> None:
        self.run, self.reference = run, reference
        kinds = {parts[0].read().dtype for (_, role, _), parts in run.entries.items() if role == "parameter"}
        self.tolerance = max(TOLERANCES.get(kind, 0.0) for kind in kinds)

    def differences(self) -> Iterator[Finding]:
        """Yield what differs in the order of a step."""
        if not self._has_same_samples():
            yield Finding("wrong", "sample", "other tokens, labels or masks")
        names = {name for name, role, _ in self.reference.entries if role in (*_FORWARD, *_BACKWARD)}
        containers = {name for name in names if any(each.startswith(f"{name}.") for each in names)}
        forward = [key for key in self.reference.entries if key[1] in _FORWARD]
        backward = [key for key in self.reference.entries if key[1] in _BACKWARD]
        backward.sort(key=lambda key: key[0] in containers)  # whose gradients are those of what is in them
        weights = [key for key in self.reference.entries if key[1] in ("parameter", "gradient", "parameter_after")]
        by_role = {role: [key for key in weights if key[1] == role] for role in ("parameter", "gradient")}
        for key in (*by_role["parameter"], *forward, *backward, *reversed(by_role["gradient"])):
            if key in self.run.entries and (found := self._difference(key)) is not None:
                yield found

    def _has_same_samples(self) -> bool:
        """Tell whether the micro-batches of both have the same tokens, labels and masks."""
        for name in ("tokens", "labels", "loss_mask"):
            ours, theirs = (_batch_of(each, name) for each in (self.run, self.reference))
            if ours is not None and theirs is not None and not torch.equal(ours, theirs):
                return False
        return True

    def _difference(self, key: _Key) -> Finding | None:
        """Return what is wrong with a tensor; None if nothing is, or if it cannot be placed."""
        ours, theirs = self.run.entries[key], self.reference.entries[key]
        if not all(self.run.is_placed(each) for each in ours) or not all(map(self.reference.is_placed, theirs)):
            return None
        (name, role, _), ratios = key, self._ratios(ours[0], theirs[0])
        is_of_stage = role in (*_FORWARD, *_BACKWARD) and len({self.run.axis(each, "pp") for each in ours}) > 1
        if ratios is None or is_of_stage:
            return None
        of_run, of_reference = ratios
        if role in _BACKWARD and self.run.shares_heads(ours[0]):  # each rank has the term of its own queries
            return None
        wanted, _ = self.reference.whole(theirs, of_reference)
        _, places = self.run.whole(ours, of_run)
        scales = [1.0]
        if role in _BACKWARD:
            scales.append(self.run.data / self.reference.data)
        for entry, indices in places:
            if any(int(each.max()) >= size for each, size in zip(indices, wanted.shape, strict=True)):
                return None
            found, part = values(entry), wanted[_grid(indices)]
            distance = min(_distance(found, scale * part, scale * wanted) for scale in scales)
            if not distance <= self.tolerance:
                shown = {"parameter": f"parameter {name}"}.get(role, f"{role.replace('_', ' ')} of {name}")
                return Finding("wrong", shown, _factor(found, part, self.tolerance))
        return None

    def _ratios(self, ours: Entry, theirs: Entry) -> tuple[list[int], list[int]] | None:
        """Return how many times larger each dimension is in the whole tensor; None if the two do not fit.

        They are the smallest numbers that make both equal, and divide the number of ranks.
        """
        if len(ours.shape) != len(theirs.shape):
            return None
        found: tuple[list[int], list[int]] = [], []
        letters = self.run.letters(ours)
        has_corner = ours.place is not None and ours.place.offset is not None
        sizes = [
            run.axis(entry, run.features_axis(entry))[1]
            for run, entry in zip((self.run, self.reference), (ours, theirs), strict=True)
        ]
        for at, (own, other) in enumerate(zip(ours.shape, theirs.shape, strict=True)):
            is_other = has_corner or letters[at : at + 1] in ("s", "b")
            pairs = (
                [(1, 1)]
                if is_other
                else [(i, j) for i in _divisors(sizes[0]) for j in _divisors(sizes[1]) if own * i == other * j]
            )
            if not pairs:
                return None
            for each, ratio in zip(found, min(pairs), strict=True):
                each.append(ratio)
        return found


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _distance(found: Tensor, part: Tensor, whole: Tensor) -> float:
    """Return the distance from a part, divided by the norm that it has if all elements are alike; infinity for NaN."""
    norm = float(whole.nan_to_num().square().mean().sqrt()) * math.sqrt(part.numel())
    distance = float((found - part).norm())
    return (
        (distance / norm if distance else 0.0) if math.isfinite(distance) and norm else (math.inf if distance else 0.0)
    )


def _factor(found: Tensor, part: Tensor, tolerance: float) -> str | None:
    """Return what a constant quotient says."""
    factor = float((found * part).sum() / part.square().sum())
    if not math.isfinite(factor) or not factor or _distance(found, factor * part, factor * part) > tolerance:
        return None
    return f"{factor:.4g} times what it should be"


def _batch_of(run: _Run, name: str) -> Tensor | None:
    """Return the tokens, labels or masks of the whole step [samples, sequence], of the first tensor-parallel ranks."""
    found: Tensor | None = None
    for batch in run.trace.batches:
        values, axes = getattr(batch, name), run.trace.coordinates[batch.rank]
        if values is None:
            return None
        if axes.get("tp", (0, 1))[0]:
            continue
        (dp, dps), (cp, cps) = (axes.get(axis, (0, 1)) for axis in ("dp", "cp"))
        count = 1 + max(each.micro_batch for each in run.trace.batches)
        if found is None:
            found = torch.full((run.samples * count * dps, run.length), -1.0, dtype=torch.float64)
        rows = (batch.micro_batch * dps + dp) * run.samples + torch.arange(run.samples)
        chunks = torch.arange(run.length).chunk(2 * cps)
        found[_grid([rows, torch.cat([chunks[cp], chunks[2 * cps - 1 - cp]])])] = values.double()
    return found


def _differences_of_files(case: Path, tolerance: float) -> Iterator[Finding]:
    """Yield figures of any step, and then weights after the last one, that differ."""
    ours, theirs = (_figures(case / name) for name in _RUNS)
    for step, name in ours:
        if (step, name) in theirs:
            own, other = ours[step, name], theirs[step, name]
            if not abs(own - other) <= OF_FIGURES * tolerance * abs(other):
                said = f"{own / other:.4g} times what it should be" if other else None
                yield Finding("wrong", f"{name} of step {step}", said)
    (before, after), (_, wanted) = (_weights(case / name) for name in _RUNS)
    for name in wanted:
        update = wanted[name] - before[name]
        if not _distance(after[name], wanted[name], update) <= OF_UPDATES * tolerance:
            yield Finding("wrong", f"parameter after of {name}", _factor(after[name] - before[name], update, tolerance))


def _figures(run: Path) -> dict[tuple[int, str], float]:
    """Return the figures of each step by name."""
    path = run / "metrics.jsonl"
    found: dict[tuple[int, str], float] = {}
    for row in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        step = row.get("step", row.get("iteration"))
        names = {"loss": "loss", "lm_loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}
        found |= {(step, short): float(row[name]) for name, short in names.items() if row.get(name) is not None}
    return found


def _weights(run: Path) -> list[dict[str, Tensor]]:
    """Return the weights before and after the run; none, if they are not in one file."""
    files = [run / name / "model.safetensors" for name in ("checkpoint", "checkpoint_next")]
    if not all(file.exists() for file in files):
        return [{}, {}]
    return [{name: each.double() for name, each in load_file(file).items()} for file in files]
