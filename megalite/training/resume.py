"""Start of a run: from nothing, or from a checkpoint and how much of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megalite import checkpoint
from megalite.checkpoint import AnyPath, Candidates, open_directory
from megalite.checkpoint.compatibility import model_config
from megalite.checkpoint.manifest import of_others
from megalite.config import CheckpointConfig, DataConfig, ModelConfig
from megalite.config.tokenizer import TokenizerFlags
from megalite.config.yaml_file import Sections
from megalite.conversion.huggingface import open_huggingface
from megalite.errors import ConfigurationError
from megalite.lifecycle.control_files import has_file
from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoints that a run may start from, and what it takes from the first of them that is whole."""

    candidates: Candidates
    """Checkpoints to start from; if there are none, the run starts fresh."""
    position: bool = True
    """Flag for continuing at the checkpoint's step and sample; else the run begins at step 0."""
    optimizer: bool = True
    """Flag for loading the optimizer's state."""
    model: Path | None = None
    """Hugging Face folder whose weights the run begins with, if there are no candidates."""


def find_resume_point(settings: CheckpointConfig, mesh: ParallelMesh) -> ResumePoint:
    """Return the checkpoints of --save under `--resume auto`, if there are any; else those of --load.

    Raises:
        ConfigurationError: the run would write among the checkpoints of another, or lacks the one it must start from.
        CheckpointError: a directory cannot be read, or ranks see different files in it.
    """

    def found(directory: str | None) -> Candidates:
        return Candidates() if directory is None else checkpoint.find_candidates(open_directory(directory), mesh)

    present = found(settings.save)
    if settings.resume == "auto" and present.paths:
        return ResumePoint(present)
    if settings.ckpt_step is not None and settings.load is not None:
        loaded = checkpoint.find_iteration(open_directory(settings.load), settings.ckpt_step, mesh)
    else:
        loaded = found(settings.load)
    model = Path(settings.load) if settings.load is not None and settings.loads_huggingface else None
    if settings.load is not None and model is None and not loaded.paths:
        _refuse_other_folders(settings.load)
        if settings.finetune:
            raise ConfigurationError(f"--finetune: --load {settings.load} holds no checkpoint to take weights from")
    if present.paths and not (loaded.paths and settings.loads_where_it_saves):
        raise ConfigurationError(
            f"--save {settings.save} holds {present.paths[0].name} of an earlier run, which this one would not "
            "continue: give --resume auto to continue it, or another --save"
        )
    if settings.exit_on_missing_checkpoint and not loaded.paths and model is None:
        places = " and ".join(f"--{name} {place}" for name in ("save", "load") if (place := getattr(settings, name)))
        raise ConfigurationError(f"--exit-on-missing-checkpoint: {places} holds no checkpoint")
    return ResumePoint(loaded, not settings.finetune, settings.load_optim and not settings.finetune, model)


def _refuse_other_folders(load: str) -> None:
    """Raise ConfigurationError if --load, which is no run directory, is a checkpoint, of ours or of others: training
    would begin with random weights."""
    folder = open_directory(load)
    if has_file(folder / "manifest.json"):
        number = folder.name.removeprefix("iter_").lstrip("0")
        raise ConfigurationError(
            f"--load {load} is one checkpoint: give its run directory, --load {folder.parent} (--ckpt-step {number})"
        )
    if has_file(folder / ".metadata"):
        raise ConfigurationError(
            f"--load {load} was not written by megalite: it has a .metadata, but no manifest.json, which says what "
            f"model it is{of_others(folder)}"
        )


def saved_fields(settings: CheckpointConfig, tokenizer_type: str | None = None) -> Sections:
    """The fields of the model and of the tokenizer in the checkpoint that a run with these settings starts from; with
    `tokenizer_type` the run has another tokenizer, whatever goes with a model that another program has written.

    Raises ConfigurationError if there is none, CheckpointError if none can be read.
    """
    resume_point = find_resume_point(settings, ParallelMesh())
    paths = resume_point.candidates.paths
    if resume_point.model is not None and not paths:
        opened = open_huggingface(resume_point.model)
        model = asdict(opened.config)
        if tokenizer_type == "NullTokenizer":
            model["vocab_size"] -= 1  # it adds the end of document
        return {"model": model, "data": {} if tokenizer_type else dict(opened.data)}
    if not paths:
        raise ConfigurationError(f"--use-checkpoint-args: {settings.load or settings.save} holds no checkpoint")
    _, (saved, data), _ = checkpoint.newest_whole(paths, _model_and_data)
    model = asdict(saved)
    if data.tokenizer_type == "NullTokenizer" and saved.vocab_size is not None:
        model["vocab_size"] -= 1  # the model's counts the end of document, which a NullTokenizer adds
    return {"model": model, "data": {field.name: getattr(data, field.name) for field in fields(TokenizerFlags)}}


def _model_and_data(path: AnyPath) -> tuple[ModelConfig, DataConfig]:
    config = checkpoint.read_config(path)
    return model_config(path, config), checkpoint.saved_section(path, config, DataConfig)
