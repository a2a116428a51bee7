"""Wrapper of pretrain_gpt.py, one of whose copies between host and device fails: COPY="KIND NUMBER".

The number counts copies. The kinds are `kill`, which ends the process when half of the copy is done, and `error`.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.commands.pretrain import main
from megalite.offload import transfers
from megalite.offload.transfers import Ready

KIND, NUMBER = os.environ["COPY"].split()
NUMBERS = count(1)
whole = transfers._copy


def part(source: Tensor, target: Tensor, after: Ready | None) -> None:
    if next(NUMBERS) < int(NUMBER):
        whole(source, target, after)
    elif KIND == "kill":
        whole(source[: len(source) // 2], target[: len(target) // 2], after)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise RuntimeError("the copy failed")


transfers._copy = part
sys.exit(main())
