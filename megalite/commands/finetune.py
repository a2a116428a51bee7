"""Fine-tune a GPT on conversations (--sft) or pairs of responses (--preference-data), with pretrain_gpt.py's flags."""

from __future__ import annotations

from functools import partial

from megalite.commands.pretrain import main
from megalite.lifecycle.failure import run_main

command = partial(run_main, partial(main, finetunes=True))
"""Run the program and exit with its code."""
