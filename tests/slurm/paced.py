"""pretrain_gpt.py, in which a file, named by HOLD, makes each step take long: so a test comes in time to disturb it."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.commands.pretrain import main
from megalite.lifecycle.failure import run_main
from megalite.training.metrics import StepMetrics
from megalite.training.trainer import Trainer

HOLD = Path(os.environ["HOLD"])
step = Trainer.step
hoard: list[bytearray] = []


def paced_step(trainer: Trainer) -> StepMetrics:
    with suppress(FileNotFoundError):
        without_memory = HOLD.read_text().split()
        time.sleep(float(os.environ.get("PAUSE", "0.5")))
        if os.environ.get("SLURMD_NODENAME") in without_memory:  # these are to use up their memory
            hoard.append(bytearray(b"x") * (1 << 28))
    return step(trainer)


if __name__ == "__main__":
    Trainer.step = paced_step  # type: ignore[method-assign]
    run_main(main)
