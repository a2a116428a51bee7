"""Traces of Megatron-LM's --save-activations-interval, --save-dgrads-interval, --save-wgrads-interval and
--save-params-interval.

Files are SAVE/KIND/iter_0000003/mp_rank_TT_PPP_EEE.pth, without the pipeline or the expert rank if there is but one,
and only of ranks of expert-data-parallel rank 0. Each has {"model_chunk0": {name: tensor}}. Names in it number the
layers of the chunk: those of the whole network follow from the layers of all stages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megalite.errors import CheckpointError
from megalite.extras.verify.readers.gathering import (
    MOST_RANKS,
    Gathering,
    TensorFiles,
    absent,
    chosen_step,
    listed,
    plain_name,
    refuse,
)
from megalite.extras.verify.readers.stages import layers_before, layers_of, with_layers_before
from megalite.extras.verify.trace import LAST, Entry, Role, Trace
from megalite.restricted_pickle import StoredTensor

_OF_MODULES: Mapping[str, tuple[Role, Role]] = {
    "activations": ("input", "output"),
    "dgrads": ("input_gradient", "output_gradient"),
}
_OF_PARAMETERS: Mapping[str, Role] = {"wgrads": "main_gradient", "params": "parameter_after"}
KINDS = (*_OF_MODULES, *_OF_PARAMETERS)
"""Names of the folders."""
_FOLDER = re.compile(r"iter_(\d{7,18})")
_FILE = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?\.pth")
_KEY = re.compile(r"(.+)/(input|output)(\d{1,4})")
_CHUNK = re.compile(r"model_chunk(\d{1,2})")
_EXPERTS = re.compile(r"\.(experts|router)\b")


def owns(path: Path) -> bool:
    """Tell whether a folder has such files: the SAVE folder, one of its folders, or one of an iteration."""
    return bool(_folders(path))


def read(path: Path, step: int | None) -> Trace:
    """Read the files of an iteration; the first one with most kinds of files if `step` is None.

    Raises:
        ConfigurationError: the iteration is not there.
        CheckpointError, DataError: the files cannot be read, or have nothing to compare.
    """
    folders = _folders(path)
    if step is None:
        step = min(folders, key=lambda each: (-len(folders[each]), each))
    step, dropped = chosen_step(path, folders, step)
    there = folders[step]
    trace = Trace("megatron", "Megatron-LM's --save-...-interval", step, dropped=dropped, gradients_of="modules")
    gathering = Gathering(path, trace)
    for kind in sorted({kind for kinds in folders.values() for kind in kinds} - set(there)):
        gathering.note(f"{kind} were not saved in iteration {step}")
    files = TensorFiles(path)
    contents = list(_contents(there, files, gathering))
    layout = _layout([file for folder in there.values() for file in _files(folder)], contents, gathering)
    trace.coordinates = dict(layout.ranks.values())
    trace.missing = layout.missing
    before = _layers_before(contents, layout, gathering)
    for content in contents:
        numbers = layout.numbers(content.file)
        rank, stage = layout.ranks[numbers][0], numbers[1]
        for chunk, key, shape, dtype in content.tensors:
            described = _described(content.kind, key)
            if described is None:
                gathering.leave_out("are neither input nor output by position (keyword arguments)")
                continue
            name, role, number = described
            entry = Entry(
                rank,
                with_layers_before(name, before[stage, chunk]),
                role,
                shape,
                f"{content.file}: model_chunk{chunk}: {key}",
                partial(files.whole, content.file, f"model_chunk{chunk}", key),
                number,
                LAST if content.kind in _OF_MODULES else 0,
            )
            gathering.add(entry, dtype)
    if any(content.kind in _OF_MODULES for content in contents):
        gathering.note("activations and their gradients are those of each rank's last micro-batch")
    return gathering.finish()


# ------------------------------------------------------------------------------------------------- files


_Described = tuple[int, str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Content:
    """Contents of a file: the chunk, the key, the shape and the type of each tensor."""

    kind: str
    file: Path
    tensors: tuple[_Described, ...]


def _folders(path: Path) -> dict[int, dict[str, Path]]:
    """Return the folders of each iteration, by kind."""
    found: dict[int, dict[str, Path]] = defaultdict(dict)
    own = _FOLDER.fullmatch(path.name)
    if own and path.parent.name in KINDS and _files(path):
        return {int(own[1]): {path.parent.name: path}}
    for folder in (path,) if path.name in KINDS else (path / kind for kind in KINDS):
        for each in listed(folder):
            match = _FOLDER.fullmatch(each.name)
            if match and _files(each):
                found[int(match[1])].setdefault(folder.name, each)
    return dict(found)


def _files(folder: Path) -> list[Path]:
    return [each for each in listed(folder) if _FILE.fullmatch(each.name)]


def _contents(folders: Mapping[str, Path], files: TensorFiles, gathering: Gathering) -> Iterator[_Content]:
    """Yield what the readable files have."""
    for kind, folder in folders.items():
        for file in _files(folder):
            try:
                yield _Content(kind, file, tuple(_tensors(file, files, gathering)))
            except CheckpointError as error:
                gathering.skip(error)


def _tensors(file: Path, files: TensorFiles, gathering: Gathering) -> Iterator[_Described]:
    """Yield the chunk, the key, the shape and the type of each tensor of a file. Raises CheckpointError."""
    chunks = files.contents(file)
    if not isinstance(chunks, dict):
        refuse(file, "has no model chunks")
    for chunk, values in chunks.items():
        match = _CHUNK.fullmatch(chunk) if isinstance(chunk, str) else None
        if match is None or chunk != f"model_chunk{int(match[1])}" or not isinstance(values, dict):
            refuse(file, "has something other than model chunks")
        for key, value in values.items():
            if not isinstance(key, str):
                refuse(file, "has a name that is no text")
            gathering.visit()
            if isinstance(value, StoredTensor):
                yield int(match[1]), key, value.shape, value.dtype
            else:
                gathering.leave_out("are no tensors, but counts, flags or tensors of another class")


def _described(kind: str, key: str) -> tuple[str, Role, int] | None:
    """Return the name, the role and the position that a key stands for; None for another argument."""
    if kind in _OF_PARAMETERS:
        return plain_name(key), _OF_PARAMETERS[kind], 0
    match = _KEY.fullmatch(key)
    return (plain_name(match[1]), _OF_MODULES[kind][match[2] == "output"], int(match[3])) if match else None


# ------------------------------------------------------------------------------------------------- layout

_Place = tuple[int, int, int]
"""Tensor-, pipeline- and expert-parallel rank."""


@dataclass(frozen=True)
class _Layout:
    """Places of files.

    Attributes:
        second: the axis of a second number in a file's name.
        ranks: the number of each place that is there, and its coordinates.
        missing: numbers of places that should be there.
        stages: number of pipeline stages.
    """

    second: str
    ranks: Mapping[_Place, tuple[int, Mapping[str, tuple[int, int]]]]
    missing: tuple[int, ...]
    stages: int

    def numbers(self, file: Path) -> _Place:
        return _numbers(file, self.second)


def _numbers(file: Path, second: str) -> _Place:
    match = _FILE.fullmatch(file.name)
    assert match is not None
    tp, one, two = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    return (tp, 0, one) if match[3] is None and second == "ep" else (tp, one, two)


def _layout(files: list[Path], contents: list[_Content], gathering: Gathering) -> _Layout:
    """Return where the files' ranks stand among all ranks, as far as the names of files tell it.

    Ranks of expert-data-parallel rank 0 are, within a stage, the first `etp` x `ep` ones: number r has tensor-parallel
    rank r mod tp and expert-parallel rank r div etp. `etp` is the one that fits the files, and tp if none does.
    """
    second = _axis_of_second(files, contents, gathering)
    named = {_numbers(file, second) for file in files}
    tp, pp, ep = (1 + max((place[axis] for place in named), default=0) for axis in range(3))
    pairs = {(place[0], place[2]) for place in named}
    sizes = [each for each in range(min(tp, len(pairs)), 0, -1) if tp % each == 0 and each * ep == len(pairs)]
    etp = next((each for each in sizes if pairs == set(_grid(tp, ep, each))), tp)
    first = etp * ep
    if pp * first > MOST_RANKS:
        refuse(files[0].parent, f"has files of {pp * first:,} ranks by their names")
    numbers = {pair: number for number, pair in enumerate(_grid(tp, ep, etp))}
    ranks: dict[_Place, tuple[int, Mapping[str, tuple[int, int]]]] = {}
    for place in sorted({_numbers(content.file, second) for content in contents}):
        number = numbers[place[0], place[2]]
        axes = {"tp": (place[0], tp), "pp": (place[1], pp), "ep": (place[2], ep), "etp": (number % etp, etp)}
        if first > tp:  # one stage has several replicas of the dense layers
            axes["dp"] = (number // tp, first // tp)
        ranks[place] = (place[1] * first + number, axes)
    gathering.note("ranks are numbered among those that save, whose expert-data-parallel rank is 0")
    there = {number for number, _ in ranks.values()}
    return _Layout(second, ranks, absent((pp * first - 1,), there), pp)


def _grid(tp: int, ep: int, etp: int) -> Iterator[tuple[int, int]]:
    """Yield the tensor- and the expert-parallel rank of each rank of a stage with expert-data-parallel rank 0."""
    return ((number % tp, number // etp) for number in range(etp * ep))


def _axis_of_second(files: list[Path], contents: list[_Content], gathering: Gathering) -> str:
    """Return the axis of the second number in names of two: the pipeline's, or that of experts.

    Only the last stage of a pipeline has the output layer.
    """
    matches = filter(None, (_FILE.fullmatch(file.name) for file in files))
    counts = {sum(number is not None for number in match.groups()) for match in matches}
    if len(counts) > 1:
        refuse(files[0].parent, "has files of several layouts of ranks")
    if counts != {2}:
        return "pp"
    heads: dict[str, set[bool]] = {}
    for content in contents:  # a network with tied embeddings has the layer, and no weight of it
        names = [key for _, key, _, _ in content.tensors]
        heads.setdefault(content.kind, set()).add(any(name.startswith("output_layer") for name in names))
    has_experts = any(_EXPERTS.search(key) for content in contents for _, key, _, _ in content.tensors)
    alike = all(len(each) == 1 for each in heads.values())
    axis, shown = ("ep", "expert-parallel") if has_experts and alike else ("pp", "pipeline")
    gathering.note(f"the second number in {files[0].name} is taken as the {shown} rank, by the names in the files")
    return axis


# ------------------------------------------------------------------------------------------------- layers


def _layers_before(contents: list[_Content], layout: _Layout, gathering: Gathering) -> Mapping[tuple[int, int], int]:
    """Return the number of layers before each chunk of each stage."""
    layers: dict[tuple[int, int], int] = {}
    for content in contents:
        stage = layout.numbers(content.file)[1]
        names: dict[int, list[str]] = defaultdict(list)
        for chunk, key, _, _ in content.tensors:
            names[chunk].append(plain_name(key))
        for chunk, those in names.items():
            layers[stage, chunk] = max(layers.get((stage, chunk), 0), layers_of(those))
    before = layers_before(layers, layout.stages)
    lost = sorted(set(range(layout.stages)) - {stage for stage, _ in layers})
    if lost:
        gathering.note(
            f"no file of pipeline stage {lost[0]} is there: its layers are taken to be as many as those of the longest"
        )
    if len(before) > 1:
        gathering.note("layers are numbered through all stages and chunks, in each of which their files begin with 0")
    return before
