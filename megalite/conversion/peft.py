"""Folders of PEFT (https://github.com/huggingface/peft): adapters of a Hugging Face model, read and written.

A module of such a folder has the matrices A and B for a weight of the files of the base. The rules of the family say
where the rows and columns of that weight are in megalite's tensors. A module may hold several matrices, such as a fused
weight of queries, keys and values: its A then has theirs one below the other, and B is zero but for the rows of each.
Read back, each of them has all of A. The ranks and scales of modules may differ: all get the largest rank, filled
up with zeros, and B takes what is left of the scale.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.atomic_files import new_folder, write_atomically
from megalite.checkpoint.tensors import Kind, Source
from megalite.config import ModelConfig
from megalite.config.adapters import AdaptersConfig
from megalite.conversion.adapters import Adapters
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import Family, choose
from megalite.conversion.huggingface import family_of, forms_of
from megalite.conversion.huggingface_files import LARGEST_CONFIG, read_config, read_json
from megalite.conversion.mapping import FileTensor
from megalite.conversion.opened import OpenedModel, tensors_of_training
from megalite.errors import CheckpointError
from megalite.parallel.adapter import MAGNITUDE, A, B, Matrix, matrices_of
from megalite.parallel.sharding import Box, LogicalTensor
from megalite.small_files import shown

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
WORDS = {A: "lora_A.weight", B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_LONGEST_PATH = 4096
_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"}
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "revision"),
    *("loftq_config", "megatron_core", "peft_version", "qalora_group_size", "target_modules", "task_type"),
    *("layers_pattern", "layers_to_transform", "runtime_config", "eva_config", "corda_config"),
}
_AS_IS = {"bias": "none"}
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""Initial values of adapters that leave the base as it is."""


def open_peft(folder: Path, base: OpenedModel) -> OpenedModel:
    """Open the model of a folder's adapters and their base. The adapters are merged into the weights of `source`.

    Raises CheckpointError if megalite cannot compute exactly this model.
    """
    config = read_config_of_adapters(folder)
    mapping, tensors = _mapping(_family(base), base.config), tensors_of_training(base.config)
    modules = {module.name: module for module in _modules(mapping, tensors)}
    found = _read_modules(folder, config, modules)
    rank = max(len(factors[A]) for factors in found.values())
    of_largest = [_scale(config, name, len(factors[A])) for name, factors in found.items() if len(factors[A]) == rank]
    rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    alpha = of_largest[0] * (math.sqrt(rank) if rslora else rank)
    own: dict[str, Tensor] = {}
    for name, factors in found.items():
        factor = _scale(config, name, len(factors[A])) / of_largest[0]
        for place in modules[name].places:
            own |= _own_tensors(place, factors, rank, factor, base.source if dora else None)
    chosen = {name.rpartition(".")[0] for name in own}
    every = [matrix.name for tensor in tensors.values() for matrix in matrices_of(tensor)]
    settings = AdaptersConfig(
        lora_rank=rank,
        lora_alpha=alpha,
        lora_dropout=float(config.get("lora_dropout") or 0.0),
        lora_target_modules=tuple(shortest_names(chosen, every)),
        use_rslora=rslora,
        use_dora=dora,
    )
    adapters = Adapters(settings, base.source, _InMemory(own), tensors, base.path)
    return OpenedModel(
        f"PEFT, {folder}, of {base.what}",
        base.config,
        adapters.merged(),
        base.data,
        base.sequence_length,
        base.folder,
        base.ends,
        notes=base.notes,
        path=base.path,
        adapters=adapters,
    )


def read_config_of_adapters(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json of a folder. Raises CheckpointError for what megalite does not compute."""
    path = folder / CONFIG
    config = read_json(path, largest=LARGEST_CONFIG)
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {shown(config.get('peft_type'))}, and only LORA is known")
    if config.get("init_lora_weights", True) not in _INITIAL:
        problems.append(f"init_lora_weights {shown(config['init_lora_weights'])} may have changed the base")
    for key in sorted(config.keys() - _READ - _WITHOUT_EFFECT - {"init_lora_weights"}):
        if config[key] and config[key] != _AS_IS.get(key):
            problems.append(f"{key} is {shown(config[key])}, which megalite does not have")
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    dropout = config.get("lora_dropout") or 0.0
    if not (isinstance(ranks, dict) and isinstance(alphas, dict)):
        raise CheckpointError(f"{path}: rank_pattern and alpha_pattern must be objects")
    if not all(type(each) is int and 0 < each < 2**31 for each in (config.get("r"), *ranks.values())):
        problems.append("r and rank_pattern must be whole numbers above 0")
    factors: list[Any] = [config.get("lora_alpha"), *alphas.values()]
    if not all(type(each) in (int, float) and 0 < each < 2**31 for each in factors):
        problems.append("lora_alpha and alpha_pattern must be numbers above 0")
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        problems.append(f"lora_dropout is {shown(dropout)}, which is no share below 1")
    names = [*ranks, *alphas]
    if others := [name for name in names if not re.fullmatch(r"[\w.]+", name)]:
        problems.append(f"{shown(others[0])} in rank_pattern or alpha_pattern is no plain name")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    return config


def base_folder(folder: Path) -> Path:
    """Return the folder of the base that a folder of PEFT names. Raises CheckpointError if it is not here."""
    named = read_json(folder / CONFIG, largest=LARGEST_CONFIG).get("base_model_name_or_path")
    for place in (Path(named), folder / named) if isinstance(named, str) and 0 < len(named) < _LONGEST_PATH else ():
        if place.is_dir() and not (place / CONFIG).is_file():  # adapters of adapters, or of themselves, are none
            return place
    raise CheckpointError(
        f"{folder / CONFIG}: base_model_name_or_path is {shown(named)}, which is no folder of a base here: write the "
        "path of the base"
    )


# ------------------------------------------------------------------------------------------------ modules and matrices


@dataclass(frozen=True)
class _Place:
    """Part of a matrix of the network in a module of the files.

    Attributes:
        box: the part of the logical tensor.
        rows: outputs of the module, in the order of the part's rows.
        columns: inputs of the module, in the order of its columns.
    """

    matrix: Matrix
    box: Box
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class _Module:
    """Linear layer of the files, with the matrices that it holds."""

    name: str
    outputs: int
    inputs: int
    transposed: bool
    places: tuple[_Place, ...]


def _mapping(family: Family, model: ModelConfig) -> list[FileTensor]:
    return next(iter(forms_of(family, model).values()))


def _family(base: OpenedModel) -> Family:
    if base.is_huggingface and base.folder is not None:
        return family_of(base.folder, read_config(base.folder))
    return choose(FAMILIES, base.config)[0]


def _modules(mapping: Sequence[FileTensor], tensors: Mapping[str, LogicalTensor]) -> Iterator[_Module]:
    """Yield the linear layers of the files that hold matrices of the network, but for those of experts."""
    for each in mapping:
        if len(each.shape) != 2 or not each.name.endswith(".weight"):
            continue
        number = [
            torch.arange(each.shape[0])[:, None].expand(each.shape),
            torch.arange(each.shape[1]).expand(each.shape),
        ]
        places: list[_Place] = []
        transposed = False
        for name, box, view in each.boxes:
            for matrix in matrices_of(tensors[name]) if name in tensors else ():
                part, at = box, [view(index) for index in number]
                if matrix.experts:
                    continue
                if matrix.part is not None:
                    dimension, index = matrix.part
                    if index not in box.indices(dimension):
                        continue
                    part = box.at([dimension], [index])
                    at = [numbers[part.relative_to(box).slices()] for numbers in at]
                columns = math.prod(part.size[d] for d in matrix.columns)
                at = [numbers.reshape(-1, columns) for numbers in at]
                transposed = bool((at[0][:, 0] == at[0][0, 0]).all()) and len(at[0]) > 1
                rows, inner = at[1 if transposed else 0], at[0 if transposed else 1]
                places.append(_Place(matrix, part, rows[:, 0].clone(), inner[0].clone()))
        if places:
            outputs, inputs = each.shape[::-1] if transposed else each.shape
            yield _Module(each.name.removesuffix(".weight"), outputs, inputs, transposed, tuple(places))


def shortest_names(chosen: Iterable[str], every: Sequence[str]) -> list[str]:
    """Return the last words of names where they stand for chosen names alone, and the other names whole."""
    chosen, others = set(chosen), set(every) - set(chosen)
    if not others:
        return ["all-linear"]
    spared = {name.rpartition(".")[2] for name in others}
    return sorted({word if (word := name.rpartition(".")[2]) not in spared else name for name in chosen})


# ------------------------------------------------------------------------------------------------ reading


class _InMemory:
    """Tensors in memory (a `Source`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._values = tensors
        self.tensors = {name: Kind(tuple(values.shape), values.dtype) for name, values in tensors.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        values.copy_(self._values[name][box.slices()])


def _read_modules(
    folder: Path, config: Mapping[str, Any], modules: Mapping[str, _Module]
) -> dict[str, dict[str, Tensor]]:
    """Return A, B and the magnitude, if there is one, of each adapted module."""
    path, found, problems = folder / WEIGHTS, dict[str, dict[str, Tensor]](), list[str]()
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                word = next((word for word, end in WORDS.items() if key.endswith(f".{end}")), None)
                name = key.removeprefix(PREFIX).removesuffix(f".{WORDS.get(word or '', '')}")
                if word is None or not key.startswith(PREFIX) or name not in modules:
                    problems.append(f"{key} belongs to no matrix of the network that can have adapters")
                    continue
                found.setdefault(name, {})[word] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    words = {A, B, MAGNITUDE} if config.get("use_dora") else {A, B}
    for name, factors in found.items():
        module, rank = modules[name], _rank(config, name)
        shapes = {A: (rank, module.inputs), B: (module.outputs, rank), MAGNITUDE: (module.outputs,)}
        for word in sorted(words | factors.keys()):
            values = factors.get(word)
            if word not in words or values is None or tuple(values.shape) != shapes[word]:
                there = "is missing" if values is None else f"has shape {list(values.shape)}"
                problems.append(f"{name}.{WORDS[word]} {there}, and not {list(shapes[word])}")
            elif not values.dtype.is_floating_point:
                problems.append(f"{name}.{WORDS[word]} is {values.dtype}, and weights are floating point")
            elif not values.double().isfinite().all():
                problems.append(f"{name}.{WORDS[word]} has NaN or infinities")
    if problems or not found:
        raise CheckpointError(f"{path}: " + "; ".join(problems[:5] or ["it has no adapters"]))
    return found


def _of_pattern(config: Mapping[str, Any], key: str, default: str, module: str) -> float:
    """Return a number that a pattern of a configuration has for a module, or the one for all."""
    patterns = config.get(key) or {}
    named = (value for name, value in patterns.items() if module == name or module.endswith(f".{name}"))
    return float(next(named, config[default]))


def _rank(config: Mapping[str, Any], module: str) -> int:
    return int(_of_pattern(config, "rank_pattern", "r", module))


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _of_pattern(config, "alpha_pattern", "lora_alpha", module)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _own_tensors(
    place: _Place, factors: Mapping[str, Tensor], rank: int, factor: float, base: Source | None
) -> dict[str, Tensor]:
    """Return the tensors of the adapters of a matrix. `base`: that of magnitudes; None without DoRA."""
    matrix, part = place.matrix, place.box
    if part.numel != math.prod(matrix.tensor.shape[d] for d in (*matrix.rows, *matrix.columns)):
        raise CheckpointError(f"{matrix.name} lies in several modules of the files: its adapters cannot be joined")
    a = torch.zeros(rank, len(place.columns), dtype=factors[A].dtype)
    a[: len(factors[A])] = factors[A][:, place.columns]
    b = torch.zeros(len(place.rows), rank, dtype=factors[B].dtype)
    b[:, : factors[B].shape[1]] = factors[B][place.rows] if factor == 1.0 else factors[B][place.rows] * factor
    found = {f"{matrix.name}.{A}": a.view(matrix.a(rank).tensor.shape)}
    found[f"{matrix.name}.{B}"] = b.view(matrix.b(rank).tensor.shape)
    if base is not None:
        lengths = factors[MAGNITUDE][place.rows] - _lengths(base, matrix, part)
        found[f"{matrix.name}.{MAGNITUDE}"] = lengths.view(matrix.magnitude().tensor.shape)
    return found


def _lengths(base: Source, matrix: Matrix, part: Box) -> Tensor:
    """Return the lengths of the rows of a matrix of the base."""
    kind = base.tensors[matrix.tensor.name]
    values = torch.empty(part.size, dtype=torch.promote_types(kind.dtype, torch.float32))
    base.fill(matrix.tensor.name, part, values)
    columns = math.prod(part.size[d] for d in matrix.columns)
    return torch.linalg.vector_norm(values.reshape(-1, columns), dim=1)


# ------------------------------------------------------------------------------------------------ writing


def write_peft(opened: OpenedModel, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write the adapters of a model as a folder of PEFT, which appears complete or not at all.

    `dtype`: dtype to cast to; None: no cast. Raises CheckpointError if there are none, or PEFT has no such modules.
    """
    adapters, folder = opened.adapters, folder.absolute()
    if adapters is None:
        raise CheckpointError(f"{opened.what} has no adapters: --saver hf writes its weights")
    if adapters.changed:
        raise CheckpointError(
            f"{opened.what} has other rotary embeddings than its base, which a folder of PEFT cannot say "
            f"({adapters.changed}): merge them (--saver hf)"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} already exists: choose another folder")
    chosen = {matrix.name for matrix in adapters.matrices()}
    modules = list(_modules(_mapping(choose(FAMILIES, opened.config)[0], opened.config), adapters.tensors))
    there = {place.matrix.name for module in modules for place in module.places}
    if missing := sorted(chosen - there):
        raise CheckpointError(f"PEFT has no adapters of {missing[0]} in files of this family: merge them (--saver hf)")
    written = dict[str, Tensor]()
    adapted, ranks = list[_Module](), dict[str, int]()
    for module in modules:
        places = [place for place in module.places if place.matrix.name in chosen]
        if places:
            adapted.append(module)
            factors = _of_module(adapters, module, places)
            ranks[module.name] = len(factors[A])
            for word, values in factors.items():
                written[f"{PREFIX}{module.name}.{WORDS[word]}"] = values if dtype is None else values.to(dtype)
    config = _config(adapters, modules, adapted, ranks)
    with new_folder(folder) as temporary:
        save_file(written, temporary / WEIGHTS, {"format": "pt"})
        write_atomically(temporary / CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _config(
    adapters: Adapters, modules: Sequence[_Module], adapted: Sequence[_Module], ranks: Mapping[str, int]
) -> dict[str, Any]:
    """Return the adapter_config.json. `ranks`: of the modules, by name."""
    own = adapters.config
    rank = own.lora_rank or 0
    alpha = float(rank if own.lora_alpha is None else own.lora_alpha)
    several = {name: number // rank for name, number in ranks.items() if number != rank}
    alphas = {name: alpha * (math.sqrt(times) if own.use_rslora else times) for name, times in several.items()}
    names = [module.name for module in adapted]
    targets = shortest_names(names, [module.name for module in modules])
    if targets == ["all-linear"]:  # which for PEFT may have others, too
        targets = sorted({name.rpartition(".")[2] for name in names})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base_path,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": own.lora_dropout,
        "target_modules": targets,
        "rank_pattern": dict(sorted((name, ranks[name]) for name in several)),
        "alpha_pattern": dict(sorted(alphas.items())),
        "use_rslora": own.use_rslora,
        "use_dora": own.use_dora,
        "fan_in_fan_out": any(module.transposed for module in adapted),
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _of_module(adapters: Adapters, module: _Module, places: Sequence[_Place]) -> dict[str, Tensor]:
    """Return A, B and the magnitude, if there is one, of a module."""
    rank, own = adapters.config.lora_rank or 0, adapters.own
    dtype = own.tensors[f"{places[0].matrix.name}.{A}"].dtype
    a = torch.zeros(len(places) * rank, module.inputs, dtype=dtype)
    b = torch.zeros(module.outputs, len(places) * rank, dtype=dtype)
    found = {A: a, B: b}
    if adapters.config.use_dora:
        found[MAGNITUDE] = torch.zeros(module.outputs, dtype=dtype)
        for place in module.places:
            found[MAGNITUDE][place.rows] = _lengths(adapters.base, place.matrix, place.box).to(dtype)
    for number, place in enumerate(places):
        matrix, inner = place.matrix, slice(number * rank, (number + 1) * rank)
        read = {word: _read(own, f"{matrix.name}.{word}") for word in found}
        a[inner, place.columns] = read[A].reshape(rank, -1)
        b[place.rows, inner] = read[B].reshape(-1, rank)
        if MAGNITUDE in found:
            found[MAGNITUDE][place.rows] += read[MAGNITUDE].flatten()
    return found


def _read(source: Source, name: str) -> Tensor:
    kind = source.tensors[name]
    values = torch.empty(kind.shape, dtype=kind.dtype)
    source.fill(name, kind.whole, values)
    return values
