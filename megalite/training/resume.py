"""Choice of the checkpoint that a run starts from, and of the parts that it restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite import checkpoint
from megalite.checkpoint import Candidates, Manifest
from megalite.checkpoint.compatibility import model_config, saved_section
from megalite.checkpoint.manifest import advise_import
from megalite.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.config.adapters import AdaptersConfig
from megalite.config.near_checkpoints import no_checkpoint
from megalite.config.run import TaskConfig
from megalite.config.tokenizer import TokenizerFlags
from megalite.config.yaml_file import Sections
from megalite.conversion.opened import OpenedModel
from megalite.errors import CheckpointError, ConfigurationError
from megalite.lifecycle.control_files import has_file
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath, open_directory

_SCHEDULES = [
    field.name
    for field in fields(OptimizerConfig)
    if field.name.startswith("lr") or field.name.endswith(("min_lr", "decoupled_lr", "weight_decay", "incr_style"))
]
"""Fields of the schedules of learning rate and weight decay."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoints that a run may start from, and the parts to restore from the newest intact one."""

    candidates: Candidates
    """Checkpoints to start from; if there are none, the run starts fresh."""
    position: bool = True
    """True: continue at the checkpoint's step and sample. False: begin at step 0."""
    optimizer: bool = True
    """True: load the optimizer's state."""
    model: AnyPath | None = None
    """Hugging Face folder, or checkpoint of a dense model to upcycle, with the initial weights, used if there are no
    candidates."""
    alone: bool = False
    """True: each rank loads a checkpoint of its own, of what it holds."""
    holders: Mapping[str, int] | None = None
    """Rank that can read each file of the checkpoint, if others cannot."""
    branches: bool = False
    """True: the run is a branch of that of the checkpoint, and begins with it."""


def find_resume_point(settings: CheckpointConfig, mesh: ParallelMesh) -> ResumePoint:
    """Return the checkpoints of --save with `--resume auto`, if there are any; otherwise those of --load, or the one
    of --branch-from.

    Raises:
        ConfigurationError: --save has checkpoints of another run, or --load has none, or not that of --branch-from.
        CheckpointError: a directory cannot be read, or ranks see different files in it.
    """

    def found(directory: str | None) -> Candidates:
        return Candidates() if directory is None else checkpoint.find_candidates(open_directory(directory), mesh)

    present = found(settings.save)
    if settings.resume == "auto" and present.paths:
        return ResumePoint(present)
    if (branch := settings.branch) is not None:
        if branch.step is not None:
            loaded = checkpoint.find_iteration(
                open_directory(branch.run), branch.step, mesh, f"--branch-from {settings.branch_from}"
            )
        elif not (loaded := Candidates(found(branch.run).paths[:1])).paths:
            raise ConfigurationError(no_checkpoint(branch.run, "--branch-from"))
    elif settings.ckpt_step is not None and settings.load is not None:
        loaded = checkpoint.find_iteration(
            open_directory(settings.load), settings.ckpt_step, mesh, f"--ckpt-step {settings.ckpt_step}"
        )
    else:
        loaded = found(settings.load)
    model = Path(settings.load) if settings.load is not None and settings.loads_huggingface else None
    if settings.load is not None and model is None and not loaded.paths:
        _refuse_other_folders(settings.load)
        if settings.moe_use_upcycling:
            raise ConfigurationError(f"--moe-use-upcycling: --load {settings.load} has no checkpoint of a dense model")
        if not settings.loads_where_it_saves:
            raise ConfigurationError(no_checkpoint(settings.load))
    if present.paths and not (loaded.paths and settings.loads_where_it_saves):
        raise ConfigurationError(
            f"--save {settings.save} has {present.paths[0].name} of an earlier run, which this one would not "
            "continue: give --resume auto to continue it, or another --save"
        )
    if settings.moe_use_upcycling and loaded.paths:
        return ResumePoint(Candidates(), model=loaded.paths[0])
    if settings.exit_on_missing_checkpoint and not loaded.paths and model is None:
        places = " and ".join(f"--{name} {place}" for name in ("save", "load") if (place := getattr(settings, name)))
        raise ConfigurationError(f"--exit-on-missing-checkpoint: {places} has no checkpoint")
    optimizer = settings.load_optim and not settings.finetune
    return ResumePoint(loaded, not settings.finetune, optimizer, model, branches=branch is not None)


def open_initial_model(path: AnyPath, *, compare: bool = True) -> OpenedModel:
    """Open the `model` of a `ResumePoint`. Raises CheckpointError. `compare`: as for `open_huggingface`."""
    from megalite.conversion.native import open_folder  # with the formats of all other programs

    return open_folder(path, torch.float32, compare=compare)


def _refuse_other_folders(load: str) -> None:
    """Raise ConfigurationError if --load is a single checkpoint, ours or another program's, and not a run directory.

    Otherwise training would start with random weights.
    """
    folder = open_directory(load)
    if has_file(folder / "manifest.json"):
        number = folder.name.removeprefix("iter_").lstrip("0")
        raise ConfigurationError(
            f"--load {load} is one checkpoint: give its run directory {folder.parent} (with --ckpt-step {number})"
        )
    if has_file(folder / ".metadata"):
        raise ConfigurationError(
            f"--load {load} was not written by megalite: it has a .metadata, but no manifest.json, which says what "
            f"model it is{advise_import(folder)}"
        )


def saved_fields(settings: CheckpointConfig, tokenizer_type: str | None = None) -> Sections:
    """Return the fields of the model, its tokenizer and its texts, of the checkpoint that a run with these starts from.

    Args:
        tokenizer_type: tokenizer from the flags. If given, it replaces the tokenizer of a Hugging Face model.

    Raises:
        ConfigurationError: there is no checkpoint.
        CheckpointError: no checkpoint can be read.
    """
    resume_point = find_resume_point(settings, ParallelMesh())
    paths = resume_point.candidates.paths
    if resume_point.model is not None and not paths:
        opened = open_initial_model(resume_point.model, compare=False)  # copies are compared where weights are read
        model = asdict(opened.config)
        if (tokenizer_type or opened.data.get("tokenizer_type")) == "NullTokenizer":
            model["vocab_size"] -= 1  # a NullTokenizer adds the end-of-document token
        tokenizer = {} if tokenizer_type else opened.data
        found: Sections = {"model": model, "data": {**tokenizer, "eos_token_ids": opened.ends}}
        if opened.adapters is not None:
            found["adapters"] = asdict(opened.adapters.config)
        return found
    if not paths:
        if settings.use_checkpoint_args:
            raise ConfigurationError(f"--use-checkpoint-args: {settings.load or settings.save} has no checkpoint")
        return {}
    keeps_schedules = settings.use_checkpoint_opt_param_scheduler and resume_point.position
    _, (saved, data, schedules, adapters), _ = checkpoint.newest_whole(
        paths, partial(_saved_sections, schedules=keeps_schedules)
    )
    # A run that began with a Hugging Face folder has no flags for its network, and continues with the checkpoint's.
    if not (settings.use_checkpoint_args or settings.loads_huggingface):
        return {"optimizer": schedules}
    model = asdict(saved)
    if data.tokenizer_type == "NullTokenizer" and saved.vocab_size is not None:
        model["vocab_size"] -= 1  # the saved size includes the end-of-document token, which a NullTokenizer adds
    kept = {name: getattr(data, name) for name in (*(each.name for each in fields(TokenizerFlags)), "eos_token_ids")}
    return {"model": model, "data": kept, "optimizer": schedules, "adapters": asdict(adapters)}


def _saved_sections(path: AnyPath, schedules: bool) -> tuple[ModelConfig, DataConfig, dict[str, Any], AdaptersConfig]:
    config = checkpoint.read_config(path)
    found = _schedules(path, config) if schedules else {}
    data, adapters = saved_section(path, config, DataConfig), saved_section(path, config, AdaptersConfig)
    return model_config(path, config), data, found, adapters


def check_schedule_unit(path: AnyPath, saved: Mapping[str, Any], config: TaskConfig) -> None:
    """Raise ConfigurationError if a schedule is kept whose lengths count other steps than this run's."""
    training, batch_size = saved.get("training", {}), config.training.global_batch_size
    counts_steps = training.get("train_iters") is not None and config.checkpoint.use_checkpoint_opt_param_scheduler
    if counts_steps and training.get("global_batch_size") != batch_size:
        raise ConfigurationError(
            f"--use-checkpoint-opt-param-scheduler: the schedule of {path} counts steps of "
            f"{training.get('global_batch_size')} samples, not of --global-batch-size {batch_size}: leave the flag "
            "out, and give the schedule's flags for this batch"
        )


def check_optimizers(path: AnyPath, described: Manifest, own: Mapping[str, OptimizerConfig]) -> None:
    """Raise CheckpointError if the state in a checkpoint is that of other optimizers than this run's.

    `own`: the hyperparameters of this run's optimizers by name, if it has several.
    """
    saved = sorted(described.training.optimizers or ())
    if saved != sorted(own):
        names = [", ".join(each) or "a single one" for each in (saved, sorted(own))]
        raise CheckpointError(
            f"{path} has the state of other optimizers: {names[0]}, and this run has {names[1]}. Give the same names, "
            "or load_optim=False, which begins new optimizers"
        )
    saved_configs = described.config.get("optimizers", {})
    for name, config in own.items():
        theirs = saved_configs.get(name, {}).get("optimizer", config.optimizer)
        if theirs != config.optimizer:
            raise CheckpointError(
                f"{path} has the state of {theirs} as the optimizer {name}, which is {config.optimizer} here"
            )


def _schedules(path: AnyPath, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the schedules in a checkpoint, with the length of a decay that lasted for the whole run."""
    optimizer = checkpoint.saved_section(path, config, OptimizerConfig)
    training = checkpoint.saved_section(path, config, TrainingConfig)
    if optimizer.weight_decay_incr_style != "constant":
        raise ConfigurationError(
            f"--use-checkpoint-opt-param-scheduler: the weight decay of {path} rises until the end of its run; leave "
            "the flag out, and give the flags of that run"
        )
    found = {name: getattr(optimizer, name) for name in _SCHEDULES}
    decays = optimizer.lr_decay_style not in ("constant", "noam")
    if decays and not (optimizer.lr_decay_iters or optimizer.lr_decay_samples):
        found |= {"lr_decay_iters": training.train_iters, "lr_decay_samples": training.train_samples}
    return found
