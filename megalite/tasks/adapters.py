"""Runs that train a part of a GPT: adapters beside a base that another folder has, or all weights but frozen ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from megalite import checkpoint
from megalite.checkpoint import Candidates
from megalite.config import CheckpointConfig, ModelConfig
from megalite.config.adapters import AdaptersConfig
from megalite.config.fields import flag_of
from megalite.conversion.opened import OpenedModel
from megalite.errors import CheckpointError, ConfigurationError
from megalite.model.gpt import GPT
from megalite.model.moe import Experts
from megalite.optim.layout import unique_parameters
from megalite.parallel.adapter import adaptable_layers, is_frozen, named
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath, open_directory, place_of
from megalite.training.resume import ResumePoint


def check_names(model: ModelConfig, adapters: AdaptersConfig) -> None:
    """Raise ConfigurationError for a name that the network does not have, or for what cannot be adapted or frozen."""
    if adapters.lora_rank is None and not adapters.freeze:
        return
    network = GPT(model, ParallelMesh(device=torch.device("meta")))
    if adapters.lora_rank is not None:
        layers = adaptable_layers(network)
        matrices = sorted((m for layer in layers for m in layer.matrices()), key=lambda matrix: matrix.is_table)
        for target in adapters.lora_target_modules:
            if not named(matrices, [target]):
                there = dict.fromkeys(matrix.name.rpartition(".")[2] for matrix in matrices)
                raise ConfigurationError(
                    f"--lora-target-modules {target}: no matrix of this network has this name; it has "
                    f"{', '.join(there)}, such as {matrices[0].name}"
                )
        for layer in layers:
            layer.chosen(adapters)
    if adapters.freeze:
        problems = list(_freeze_problems(network, adapters.freeze))
        if problems:
            raise ConfigurationError("\n".join(problems))


@lru_cache(maxsize=1)
def adapter_products(model: ModelConfig, adapters: AdaptersConfig) -> float | None:
    """Return the multiplications of all adapters for a token, or None without adapters.

    Rows of the B of an embedding are looked up. A token passes the adapters of the experts that it chooses.
    """
    if adapters.lora_rank is None:
        return None
    total = 0
    for layer in adaptable_layers(GPT(model, ParallelMesh(device=torch.device("meta")))):
        times = model.moe_router_topk if isinstance(layer, Experts) else 1
        for matrix in layer.chosen(adapters):
            rows, columns = matrix.tensor.matrix_size
            total += times * (columns if matrix.looked_up else rows + columns)
    return float(total * adapters.lora_rank)


def _freeze_problems(network: GPT, patterns: Sequence[str]) -> Iterator[str]:
    """Yield a line for each problem of --freeze. On one rank, all is one parameter that is so on any rank."""
    names = [parameter.sharding.name.split("+") for parameter in unique_parameters(network)]
    every = [name for fused in names for name in fused]
    for pattern in patterns:
        if not any(is_frozen(name, [pattern]) for name in every):
            begins = dict.fromkeys(name.partition(".")[0] for name in every)
            yield (
                f"--freeze {pattern}: no weight of this network has such a name; names begin with {', '.join(begins)}, "
                f"such as {every[-1]}"
            )
    if all(is_frozen(name, patterns) for name in every):
        yield "--freeze names all weights: leave some to train"
    for fused in names:
        frozen = [name for name in fused if is_frozen(name, patterns)]
        if frozen and (trained := [name for name in fused if name not in frozen]):
            yield f"--freeze has {frozen[0]}, and not {trained[0]}, with which it is one tensor in memory: name both"


def saved_adapters(path: AnyPath, config: Mapping[str, Any]) -> AdaptersConfig:
    """Return the options of the run that saved the checkpoint at `path` with this configuration."""
    return checkpoint.saved_section(path, config, AdaptersConfig)


def check_adapters(path: AnyPath, config: Mapping[str, Any], own: AdaptersConfig, model: ModelConfig) -> None:
    """Raise CheckpointError if a checkpoint has adapters that this run has not, or others."""
    saved = saved_adapters(path, config)
    if saved.lora_rank is None:
        return
    if own.lora_rank is None:
        raise CheckpointError(
            f"{path} has adapters alone: give --lora-rank {saved.lora_rank} and the other flags of its run to train "
            "them on, or merge them into their base (tools/checkpoint/convert.py) and load that"
        )
    check_same_adapters(str(path), saved, own, model)


def check_same_adapters(what: str, saved: AdaptersConfig, own: AdaptersConfig, model: ModelConfig) -> None:
    """Raise CheckpointError if the adapters of `what` have another scale, or other matrices, than those of this run."""
    if saved == own:
        return
    layers = adaptable_layers(GPT(model, ParallelMesh(device=torch.device("meta"))))
    matrices = [matrix for layer in layers for matrix in layer.matrices()]

    def of(config: AdaptersConfig) -> dict[str, Any]:
        """Return what counts, by the flags that say it."""
        return {
            "lora_rank": config.lora_rank,
            "lora_alpha use_rslora": config.lora_scale,
            "lora_target_modules": [matrix.name for matrix in named(matrices, config.lora_target_modules)],
            "use_dora": config.use_dora,
        }

    theirs, ours = of(saved), of(own)
    names = [name for flags in ours if theirs[flags] != ours[flags] for name in flags.split()]
    different = [
        f"{flag_of(name)}: {then} in the checkpoint, {now} in this run"
        for name in names
        if (then := getattr(saved, name)) != (now := getattr(own, name))
    ]
    if different:
        raise CheckpointError("\n  ".join([f"{what} has other adapters than this run:", *different]))


def check_same_trained(path: AnyPath, config: Mapping[str, Any], own: AdaptersConfig) -> None:
    """Raise CheckpointError if the run that saved a checkpoint has frozen other weights."""
    saved = saved_adapters(path, config)
    if saved.freeze != own.freeze:
        raise CheckpointError(
            f"{path} is of a run that trained other weights, and its optimizer state is not of those of this one: "
            f"--freeze {' '.join(saved.freeze) or 'nothing'}, here {' '.join(own.freeze) or 'nothing'}. Give "
            "--no-load-optim to go on with new state, --finetune to begin at step 0"
        )


def start_of_adapters(found: ResumePoint, settings: CheckpointConfig, mesh: ParallelMesh) -> ResumePoint:
    """Return where a run with adapters starts: from adapters, or from the weights that it adapts.

    Raises CheckpointError, the same on all ranks, if --save has checkpoints of a run without adapters.
    """
    paths = found.candidates.paths
    if not paths:
        return found
    with raise_on_all_ranks(mesh, None):
        _, saved, _ = checkpoint.newest_whole(paths, lambda path: saved_adapters(path, checkpoint.read_config(path)))
        if saved.lora_rank is not None:
            return found
        if found.branches:
            raise ConfigurationError(
                f"--branch-from {settings.branch_from} is of a run without adapters, with which these begin a run of "
                "their own: give its directory by --load"
            )
        if settings.save is not None and paths[0].parent == open_directory(settings.save):
            raise ConfigurationError(
                f"--save {settings.save} has {paths[0].name} of a run without adapters: give --load {settings.save} "
                "and another --save"
            )
    return replace(found, candidates=Candidates(notes=found.candidates.notes), model=paths[0])


def base_of(path: AnyPath, config: Mapping[str, Any], settings: CheckpointConfig) -> OpenedModel | None:
    """Open the base of the adapters in the checkpoint at `path`, if it was a folder: that of --load, or the named one.

    A --load that has the checkpoint, or the named folder, does not say where the base is now. Raises CheckpointError if
    it is in neither.
    """
    from megalite.conversion.native import named_base, open_base  # with the formats of all other programs

    if (named := named_base(path, config)) is None:  # the initial weights
        return None
    places = [named]
    if settings.load is not None:
        load, before = (place_of(open_directory(each)) for each in (settings.load, named))
        known = before, place_of(open_directory(named).parent), place_of(path), place_of(path.parent)
        places.insert(len(places) if load in known else 0, settings.load)
    return open_base(path, places, "--load")  # the trainer compares what all ranks have loaded
