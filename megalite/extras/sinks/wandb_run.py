"""Weights & Biases: a run in a project, with Megatron-LM's names."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from megalite.extras.sinks.background import Record
from megalite.extras.sinks.curves import Curves
from megalite.extras.sinks.description import Description
from megalite.extras.sinks.identity import keep_name, kept_name


class WandBRun:
    """Service that logs to Weights & Biases. The key is that of `wandb login` or WANDB_API_KEY.

    A resumed run continues under its name. Weights & Biases takes no step a second time: those between the checkpoint
    and the end of the attempt before keep their first values.
    """

    name = "wandb"
    interval_s = 2.0

    def __init__(self, description: Description) -> None:
        self._description = description
        self._curves = Curves(description.consumed_samples)
        self._run: Any = None

    def open(self) -> None:
        """Begin or continue the run, with the configuration."""
        import wandb

        description, place = self._description, self._description.place
        name = (description.continues and kept_name(place, self.name)) or secrets.token_hex(8)
        keep_name(place, self.name, name)
        folder = description.option("wandb_save_dir") or (place / "wandb" if isinstance(place, Path) else None)
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        # Nothing of the environment, the repository or the screen is sent.
        private: dict[str, Any] = {
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "disable_git": True,
            "disable_code": True,
        }
        self._run = wandb.init(
            project=description.option("wandb_project") or "megalite",
            entity=description.option("wandb_entity"),
            name=description.option("wandb_exp_name"),
            dir=folder,
            id=name,
            resume="allow",
            config=description.sections,
            settings=wandb.Settings(silent=True, console="off", disable_job_creation=True, **private),
        )

    def send(self, records: Sequence[Record]) -> None:
        """Log each record at its step."""
        for record in records:
            self._run.log(self._curves.of(record), step=cast(int, record["iteration"]))

    def close(self, *, ended: bool) -> None:
        """Wait until all is uploaded."""
        self._run.finish(exit_code=0 if ended else 1)
