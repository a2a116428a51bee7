"""Options: where the run is saved, and what it continues from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = None
    """The run directory: checkpoints, config.yaml, metrics.jsonl, logs. May be a URL, as in s3://bucket/run."""
    save_interval: int | None = None
    """Steps between checkpoints; unset: only at the end and on exit."""
    save_retain_interval: int | None = None
    """Keep checkpoints of steps that are multiples of this, and the newest two; unset: all."""
    save_optim: bool = True
    """Save the optimizer's state; without it a checkpoint holds weights alone."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in host memory, while training goes on."""
    ckpt_format: Literal["megalite", "torch_dist"] = "megalite"
    """Format to write: safetensors files, or those that torch.distributed.checkpoint reads too. Either is loaded."""
    tolerated_save_failures: int = 2
    """Failed saves in a row after which training still goes on to the next; 0: the first ends the run."""
    log_progress: bool = False
    """Keep a progress.txt in the run directory: a line for each start, checkpoint and end."""
    load: str | None = None
    """Run directory, or its URL, whose latest checkpoint the run starts from, if it holds one. Or a Hugging Face
    folder: the run begins with its weights, its network and its tokenizer, unless flags name others."""
    resume: Literal["auto"] | None = None
    """auto: continue from the latest checkpoint under save where there is one, else from load, else anew."""
    ckpt_step: int | None = None
    """Load the checkpoint of this step, and no other."""
    exit_on_missing_checkpoint: bool = False
    """Do not start anew where load (or resume) finds no checkpoint."""
    finetune: bool = False
    """Take the weights alone from load: the run begins at step 0, at the first sample."""
    load_optim: bool = True
    """Load the optimizer's state; without it a new optimizer goes on with the weights at their step."""
    load_casts: bool = False
    """Load weights and state that were saved in another precision, rounded to this run's."""
    use_checkpoint_args: bool = False
    """Take the fields of the model and the tokenizer that are not given from the checkpoint to load."""

    @property
    def loads_huggingface(self) -> bool:
        """True if load is a Hugging Face folder."""
        if self.load is None or is_url(self.load):
            return False
        return os.path.isfile(os.path.join(self.load, "config.json"))  # False where the system takes no such name

    @property
    def loads_where_it_saves(self) -> bool:
        """True if load and save are one directory."""
        if self.save is None or self.load is None:
            return False
        return _one_name(self.save) == _one_name(self.load)


def is_url(directory: str) -> bool:
    """Tell if a directory is on an object store, as s3://bucket/run is."""
    return "://" in directory


def _one_name(directory: str) -> str:
    return directory.rstrip("/") if is_url(directory) else os.path.realpath(directory)
