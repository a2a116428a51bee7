"""Commands: one module per program. pretrain_gpt.py and the scripts in tools/ call these modules too."""

from __future__ import annotations
