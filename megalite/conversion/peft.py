"""Folders of PEFT (https://github.com/huggingface/peft): adapters of a Hugging Face model, read and written.

A module of such a folder has the matrices A and B for a weight of the base (`peft_modules.py`). The rules of the family
say where the rows and columns of that weight are in megalite's tensors. A module may hold several matrices, such as a
fused weight of queries, keys and values: its A then has theirs one below the other, and B is zero but for the rows of
each. Read back, each of them has all of A. The ranks and scales of modules may differ: all get the largest rank,
filled up with zeros, and B takes what is left of the scale.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.atomic_files import new_folder, write_atomically
from megalite.checkpoint.tensors import Source
from megalite.config import ModelConfig
from megalite.config.adapters import AdaptersConfig
from megalite.conversion.adapters import Adapters, InMemory
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import Family, choose
from megalite.conversion.huggingface import family_of, forms_of
from megalite.conversion.huggingface_files import LARGEST_CONFIG, read_config, read_json
from megalite.conversion.mapping import FileTensor
from megalite.conversion.opened import OpenedModel, tensors_of_training
from megalite.conversion.peft_modules import Module, Place, modules_of, prefixes, shortest_names
from megalite.errors import CheckpointError
from megalite.parallel.adapter_matrices import MAGNITUDE, A, B, Matrix, matrices_of
from megalite.parallel.sharding import Box, LogicalTensor
from megalite.small_files import shown

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_LONGEST_PATH = 4096
_READ = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
    "target_parameters",
}
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
    modules = {module.target: module for module in _own_modules(mapping, tensors, base.config)}
    found = _read_modules(folder, config, modules, _Tables(mapping, base.source))
    ranks = {name: factors[A].shape[1] for name, factors in found.items()}
    rank = max(ranks.values())
    of_largest = [_scale(config, name, own) for name, own in ranks.items() if own == rank]
    rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    alpha = of_largest[0] * (math.sqrt(rank) if rslora else rank)
    own: dict[str, Tensor] = {}
    for name, factors in found.items():
        factor = _scale(config, name, ranks[name]) / of_largest[0]
        for place in modules[name].places:
            own |= _own_tensors(place, factors, rank, factor, base.source if dora else None)
    chosen = {name.rpartition(".")[0] for name in own}
    every = [matrix for tensor in tensors.values() for matrix in matrices_of(tensor)]
    settings = AdaptersConfig(
        lora_rank=rank,
        lora_alpha=alpha,
        lora_dropout=float(config.get("lora_dropout") or 0.0),
        lora_target_modules=tuple(_targets(chosen, every)),
        use_rslora=rslora,
        use_dora=dora,
    )
    adapters = Adapters(settings, base.source, InMemory(own), tensors, base.path)
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
    dropout, parameters = config.get("lora_dropout") or 0.0, config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
        problems.append(f"target_parameters is {shown(parameters)}, and no list of names")
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


def _targets(chosen: set[str], every: Sequence[Matrix]) -> list[str]:
    """Return the names by which a configuration has the chosen matrices. Tables are not among "all-linear"."""
    tables = {matrix.name for matrix in every if matrix.is_table}
    linear = [matrix.name for matrix in every if not matrix.is_table]
    named = ["all-linear"] if chosen - tables == set(linear) else shortest_names(chosen - tables, linear)
    return [*named, *sorted(name.rpartition(".")[2] for name in chosen & tables)]


def _own_modules(
    mapping: Sequence[FileTensor], tensors: Mapping[str, LogicalTensor], model: ModelConfig
) -> list[Module]:
    """Return the modules that can have adapters: not the table of an embedding that another layer has, too."""
    found = modules_of(mapping, tensors)
    return [module for module in found if not (module.looked_up and model.shares_embedding)]


def _mapping(family: Family, model: ModelConfig) -> list[FileTensor]:
    return next(iter(forms_of(family, model).values()))


def _family(base: OpenedModel) -> Family:
    if base.is_huggingface and base.folder is not None:
        return family_of(base.folder, read_config(base.folder))
    return choose(FAMILIES, base.config)[0]


# ------------------------------------------------------------------------------------------------ reading


class _Tables:
    """Tables of tokens of the base, which PEFT saves beside their adapters."""

    def __init__(self, mapping: Sequence[FileTensor], source: Source) -> None:
        self._mapping, self._source = {each.name: each for each in mapping}, source

    def problem(self, key: str, values: Tensor) -> str | None:
        """Return what is wrong with a tensor of a folder that is no factor; None if it is such a table, unchanged."""
        name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
        each = self._mapping.get(name)
        if each is None or not key.startswith(PREFIX):
            return f"{key} belongs to no matrix of the network that can have adapters"
        expected = torch.empty(each.shape, dtype=values.dtype)
        for tensor, box, view in each.boxes:
            self._source.fill(tensor, box, view(expected))
        return None if torch.equal(values, expected) else f"{key} has other values than the base"


def _read_modules(
    folder: Path, config: Mapping[str, Any], modules: Mapping[str, Module], tables: _Tables
) -> dict[str, dict[str, Tensor]]:
    """Return A, B and the magnitude, if there is one, of each adapted module."""
    path, found, problems = folder / WEIGHTS, dict[str, dict[str, Tensor]](), list[str]()
    parameters = tuple(f".{each}" for each in config.get("target_parameters") or ())
    targets = [each for each in modules.values() if not each.parameter or f".{each.target}".endswith(parameters)]
    names = {
        f"{PREFIX}{prefix}.{end}": (target, word)
        for target, prefix in prefixes(targets).items()
        for word, end in modules[target].words.items()
    }
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                if key in names:
                    name, word = names[key]
                    found.setdefault(name, {})[word] = file.get_tensor(key)
                elif (problem := tables.problem(key, file.get_tensor(key))) is not None:
                    problems.append(problem)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    words = {A, B, MAGNITUDE} if config.get("use_dora") else {A, B}
    for name, factors in found.items():
        module = modules[name]
        if words > module.words.keys():
            problems.append(f"{name} has DoRA, which megalite has not for it")
            continue
        if (rank := _rank(config, name)) > module.largest_rank:  # which all modules would get
            problems.append(f"{name} has rank {rank}, and no update of it has more than {module.largest_rank}")
            continue
        shapes = module.shapes(rank)
        for word in sorted(words | factors.keys()):
            values = factors.get(word)
            if word not in words or values is None or tuple(values.shape) != shapes[word]:
                there = "is missing" if values is None else f"has shape {list(values.shape)}"
                problems.append(f"{name}.{module.words[word]} {there}, and not {list(shapes[word])}")
            elif not values.dtype.is_floating_point:
                problems.append(f"{name}.{module.words[word]} is {values.dtype}, and weights are floating point")
            elif not values.double().isfinite().all():
                problems.append(f"{name}.{module.words[word]} has NaN or infinities")
    if problems or not found:
        raise CheckpointError(f"{path}: " + "; ".join(problems[:5] or ["it has no adapters"]))
    return {
        name: {word: modules[name].from_files(word, values) for word, values in factors.items()}
        for name, factors in found.items()
    }


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
    place: Place, factors: Mapping[str, Tensor], rank: int, factor: float, base: Source | None
) -> dict[str, Tensor]:
    """Return the tensors of the adapters of a matrix. `base`: that of magnitudes; None without DoRA."""
    matrix, part = place.matrix, place.box
    if part.numel != math.prod(matrix.tensor.shape[d] for d in (*matrix.rows, *matrix.columns)):
        raise CheckpointError(f"{matrix.name} lies in several modules of the files: its adapters cannot be joined")
    experts, own, _ = factors[A].shape
    a = torch.zeros(experts, rank, len(place.columns), dtype=factors[A].dtype)
    a[:, :own] = factors[A][..., place.columns]
    b = torch.zeros(experts, len(place.rows), rank, dtype=factors[B].dtype)
    b[..., :own] = factors[B][:, place.rows] if factor == 1.0 else factors[B][:, place.rows] * factor
    found = {f"{matrix.name}.{A}": a.view(matrix.a(rank).tensor.shape)}
    found[f"{matrix.name}.{B}"] = b.view(matrix.b(rank).tensor.shape)
    if base is not None:
        lengths = factors[MAGNITUDE][place.with_lengths] - _lengths(base, matrix, part)
        found[f"{matrix.name}.{MAGNITUDE}"] = lengths.view(matrix.magnitude().tensor.shape)
    return found


def _lengths(base: Source, matrix: Matrix, part: Box) -> Tensor:
    """Return the lengths of the rows of a matrix of the base, or of its columns if it is looked up."""
    kind = base.tensors[matrix.tensor.name]
    values = torch.empty(part.size, dtype=torch.promote_types(kind.dtype, torch.float32))
    base.fill(matrix.tensor.name, part, values)
    columns = math.prod(part.size[d] for d in matrix.columns)
    return torch.linalg.vector_norm(values.reshape(-1, columns), dim=0 if matrix.looked_up else 1)


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
    modules = _own_modules(_mapping(choose(FAMILIES, opened.config)[0], opened.config), adapters.tensors, opened.config)
    there = {place.matrix.name for module in modules for place in module.places}
    if missing := sorted(chosen - there):
        raise CheckpointError(f"PEFT has no adapters of {missing[0]} in files of this family: merge them (--saver hf)")
    _check_apart(modules, chosen)
    adapted = [module for module in modules if any(place.matrix.name in chosen for place in module.places)]
    written, ranks, names = dict[str, Tensor](), dict[str, int](), prefixes(adapted)
    for module in adapted:
        factors = _of_module(adapters, module, [place for place in module.places if place.matrix.name in chosen])
        ranks[module.target] = factors[A].shape[1]
        for word, values in factors.items():
            stored = module.to_files(word, values if dtype is None else values.to(dtype))
            written[f"{PREFIX}{names[module.target]}.{module.words[word]}"] = stored.contiguous()
    config = _config(adapters, modules, adapted, ranks)
    with new_folder(folder) as temporary:
        save_file(written, temporary / WEIGHTS, {"format": "pt"})
        write_atomically(temporary / CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _check_apart(modules: Sequence[Module], chosen: Container[str]) -> None:
    """Raise CheckpointError if PEFT takes adapters of a dense layer for those of experts, whose matrices it renames."""
    if not any(module.parameter == "gate_up_proj" for module in modules):
        return
    for module in modules:
        named = module.name.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")
        if named and not module.parameter and any(place.matrix.name in chosen for place in module.places):
            raise CheckpointError(
                f"PEFT takes the name of {module.name} for that of experts, which this network has, too: merge the "
                "adapters (--saver hf), or leave the matrix out of --lora-target-modules"
            )


def _config(
    adapters: Adapters, modules: Sequence[Module], adapted: Sequence[Module], ranks: Mapping[str, int]
) -> dict[str, Any]:
    """Return the adapter_config.json. `ranks`: of the modules, by name."""
    own = adapters.config
    rank = own.lora_rank or 0
    alpha = float(rank if own.lora_alpha is None else own.lora_alpha)
    several = {name: number // rank for name, number in ranks.items() if number != rank}
    alphas = {name: alpha * (math.sqrt(times) if own.use_rslora else times) for name, times in several.items()}
    targets = {
        of_parameters: shortest_names(
            [module.target for module in adapted if bool(module.parameter) is of_parameters],
            [module.target for module in modules if bool(module.parameter) is of_parameters],
        )
        for of_parameters in (False, True)
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base_path,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": own.lora_dropout,
        "target_modules": targets[False],
        "target_parameters": targets[True] or None,
        "rank_pattern": dict(sorted((name, ranks[name]) for name in several)),
        "alpha_pattern": dict(sorted(alphas.items())),
        "use_rslora": own.use_rslora,
        "use_dora": own.use_dora,
        "fan_in_fan_out": any(module.transposed for module in adapted),
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _of_module(adapters: Adapters, module: Module, places: Sequence[Place]) -> dict[str, Tensor]:
    """Return A, B and the magnitude, if there is one, of a module."""
    rank, own = adapters.config.lora_rank or 0, adapters.own
    dtype = own.tensors[f"{places[0].matrix.name}.{A}"].dtype
    experts = max(module.experts, 1)
    a = torch.zeros(experts, len(places) * rank, module.inputs, dtype=dtype)
    b = torch.zeros(experts, module.outputs, len(places) * rank, dtype=dtype)
    found = {A: a, B: b}
    if adapters.config.use_dora:
        found[MAGNITUDE] = torch.zeros(module.shapes(rank)[MAGNITUDE], dtype=dtype)
        for place in module.places:
            found[MAGNITUDE][place.with_lengths] = _lengths(adapters.base, place.matrix, place.box).to(dtype)
    for number, place in enumerate(places):
        matrix, inner = place.matrix, slice(number * rank, (number + 1) * rank)
        read = {word: _read(own, f"{matrix.name}.{word}") for word in found}
        a[:, inner, place.columns] = read[A].reshape(experts, rank, -1)
        b[:, place.rows, inner] = read[B].reshape(experts, -1, rank)
        if MAGNITUDE in found:
            found[MAGNITUDE][place.with_lengths] += read[MAGNITUDE].flatten()
    return found


def _read(source: Source, name: str) -> Tensor:
    kind = source.tensors[name]
    values = torch.empty(kind.shape, dtype=kind.dtype)
    source.fill(name, kind.whole, values)
    return values
