"""Options of saving and loading checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalite.config.fields import NonNegativeInt, PositiveInt, given

_OF_SAVE = """save_interval save_retain_interval save_optim async_save tolerated_save_failures log_progress
    resume"""
_OF_LOAD = "ckpt_step finetune load_optim moe_use_upcycling resize_vocabulary"
_STEP = re.compile(r"\d{1,15}|latest")
_OF_EITHER = """exit_on_missing_checkpoint load_casts use_checkpoint_args use_checkpoint_opt_param_scheduler
    allow_changed_rotary"""


@dataclass(frozen=True)
class BranchPoint:
    """Checkpoint with which a branch begins: run directory and step; None: its latest."""

    run: str
    step: int | None


@dataclass(frozen=True)
class CheckpointConfig:
    """Options of saving and loading."""

    save: str | None = None
    """The run directory: checkpoints, config.yaml, metrics.jsonl, logs. May be a URL, as in s3://bucket/run."""
    save_interval: PositiveInt | None = None
    """Steps between checkpoints; unset: only at the end and on exit."""
    save_retain_interval: PositiveInt | None = None
    """Keep checkpoints of steps that are multiples of this, and the newest two; unset: all."""
    save_optim: bool = True
    """Save the optimizer's state; without it a checkpoint contains only weights."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in host memory, while training continues."""
    ckpt_format: Literal["megalite", "torch_dist"] = "megalite"
    """Format to write: safetensors files, or files that torch.distributed.checkpoint reads, too. Both can be loaded."""
    tolerated_save_failures: NonNegativeInt = 2
    """Consecutive failed saves after which training still continues; 0: the first failure ends the run."""
    log_progress: bool = False
    """Write progress.txt in the run directory: a line for each start, checkpoint and end."""
    load: str | None = None
    """Run directory, or its URL: the run starts from its latest checkpoint, which only save's own folder may lack. Or a
    Hugging Face folder: a run starts with its weights, its network and its tokenizer, unless flags choose others. Or
    one of PEFT: it starts with these adapters of the base that the folder names."""
    resume: Literal["auto"] | None = None
    """auto: continue from save's checkpoint, else from load; without load start anew."""
    branch_from: str | None = None
    """RUN@STEP: begin a new run, in save, from the checkpoint of this step of another run directory (or its latest,
    RUN@latest), with all that it has: weights, optimizer, position. The new run says where it comes from."""
    ckpt_step: NonNegativeInt | None = None
    """Load only the checkpoint of this step."""
    exit_on_missing_checkpoint: bool = False
    """Do not start a new run if load is save's own folder (or with resume), and it has no checkpoint."""
    finetune: bool = False
    """Load only the weights: the run starts at step 0, at the first sample."""
    load_optim: bool = True
    """Load the optimizer's state; without it, the run continues at the same step with a new optimizer."""
    load_casts: bool = False
    """Load weights and state that were saved in another precision, rounded to the precision of this run."""
    moe_use_upcycling: bool = False
    """Load a dense model and make each expert a copy of its layer's feed-forward; the run starts at step 0."""
    resize_vocabulary: bool = False
    """Let the model of a Hugging Face folder grow if its tokenizer has more tokens: each new row of the embedding and
    of the output layer begins as the mean of the others."""
    allow_changed_rotary: bool = False
    """Continue although the rotary embeddings have another base or scaling than in the checkpoint, as they need for
    longer samples (position-embedding-type yarn)."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Keep the schedules of the learning rate and the weight decay of the checkpoint, if there is one, whatever the
    flags say."""
    use_checkpoint_args: bool = False
    """Use the checkpoint's fields of the model and the tokenizer, unless flags give them."""

    @property
    def branch(self) -> BranchPoint | None:
        """Checkpoint that branch-from names; None if the run is no branch. Raises ValueError if it names none."""
        if self.branch_from is None:
            return None
        run, _, step = self.branch_from.rpartition("@")
        if not run or not _STEP.fullmatch(step):
            raise ValueError(f"--branch-from {self.branch_from}: give RUN@STEP, such as run/a@1000, or RUN@latest")
        return BranchPoint(run, None if step == "latest" else int(step))

    @property
    def may_continue(self) -> bool:
        """True if the run may go on from a checkpoint of another directory, or of save by load."""
        return self.load is not None or self.branch_from is not None

    @property
    def loads_huggingface(self) -> bool:
        """True if load is a Hugging Face folder, or one of PEFT."""
        if self.load is None or is_url(self.load):
            return False
        files = (os.path.join(self.load, name) for name in ("config.json", "adapter_config.json"))
        return any(map(os.path.isfile, files))  # False if the path is not valid on this system

    @property
    def loads_where_it_saves(self) -> bool:
        """True if load and save are the same directory."""
        if self.save is None or self.load is None:
            return False
        return _one_name(self.save) == _one_name(self.load)


def is_url(directory: str) -> bool:
    """Tell whether a directory is on an object store, such as s3://bucket/run."""
    return "://" in directory


def checkpoints_in(folder: Path) -> Literal["megalite", "megatron"] | None:
    """Return whose checkpoints a folder has, or is one of; None if no file tells it."""

    def has(*names: str) -> bool:
        return any(True for name in names for place in ("", "*/") for _ in folder.glob(place + name))

    if has("manifest.json"):
        return "megalite"
    return "megatron" if has("metadata.json", "common.pt", "mp_rank_*") else None


def _one_name(directory: str) -> str:
    return directory.rstrip("/") if is_url(directory) else os.path.realpath(directory)


def _branch_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield what is wrong with a branch, which begins with all of one checkpoint, in a directory of its own."""
    try:
        branch = checkpoint.branch
    except ValueError as error:
        yield str(error)
        return
    assert branch is not None
    if checkpoint.save is None:
        yield "--branch-from needs --save, the directory of the new run"
    elif _one_name(checkpoint.save) == _one_name(branch.run):
        yield (
            f"--branch-from {checkpoint.branch_from} begins a new run: give another --save, or go back within this run "
            "by --load and --ckpt-step"
        )
    for flag in given(checkpoint, f"load {_OF_LOAD}"):
        yield f"{flag} contradicts --branch-from, which takes one checkpoint with all that it has: drop one"


def checkpoint_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    if checkpoint.save is None:
        for flag in given(checkpoint, _OF_SAVE):
            yield f"{flag} needs --save, the run directory"
    elif is_url(checkpoint.save) and checkpoint.ckpt_format != "megalite":
        yield (
            f"--ckpt-format {checkpoint.ckpt_format} needs a --save that is a folder, not {checkpoint.save}: there "
            "its .metadata would be overwritten before the new checkpoint is complete"
        )
    if checkpoint.save is not None and is_url(checkpoint.save) and checkpoint.log_progress:
        yield f"--log-progress appends to a file in --save, which must be a folder, not {checkpoint.save}"
    if checkpoint.branch_from is not None:
        yield from _branch_problems(checkpoint)
    elif checkpoint.load is None:
        for flag in given(checkpoint, _OF_LOAD):
            yield f"{flag} needs --load, the run directory to load from"
        if checkpoint.resume is None:
            for flag in given(checkpoint, _OF_EITHER):
                yield f"{flag} needs --load or --resume auto"
    # Options without a meaning if --load and --save are the same directory.
    if checkpoint.loads_where_it_saves and checkpoint.resume == "auto":
        for flag in given(checkpoint, _OF_LOAD):
            yield (
                f"{flag} is for the checkpoint in --load, but --resume auto continues the newest in --save, which is "
                "the same directory: drop one of the two, or save elsewhere"
            )
    elif checkpoint.loads_where_it_saves and checkpoint.finetune:
        yield "--finetune begins a new run at step 0: --save and --load must be different directories"
    if not checkpoint.save_optim and checkpoint.resume == "auto":
        yield "--resume auto continues with the optimizer's state, which --no-save-optim does not save: drop one"
    if checkpoint.resize_vocabulary and checkpoint.load is not None and not checkpoint.loads_huggingface:
        yield (
            f"--resize-vocabulary is for the model of a Hugging Face folder, but --load {checkpoint.load} has no "
            "config.json: drop it"
        )
    if checkpoint.moe_use_upcycling:
        for flag in given(checkpoint, "finetune load_optim load_casts"):
            yield f"{flag} has no effect with --moe-use-upcycling, which loads the weights of a dense model: drop it"
    retained, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if retained is not None and interval is None:
        yield f"--save-retain-interval {retained} needs --save-interval"
    elif retained is not None and interval is not None and retained % interval:
        yield f"--save-retain-interval {retained} is not a multiple of --save-interval {interval}: few steps fit both"
