"""Pre-train layers of a pattern (--hybrid-layer-pattern), with the flags that Megatron-LM's pretrain_hybrid.py has."""

from __future__ import annotations

from functools import partial

from megalite.commands.pretrain import main
from megalite.lifecycle.failure import run_main

command = partial(run_main, partial(main, hybrid=True))
"""Run the program and exit with its code."""
