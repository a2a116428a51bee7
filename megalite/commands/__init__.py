"""The programs: a module for each command, which pretrain_gpt.py and the scripts of tools/ call, too."""

from __future__ import annotations
