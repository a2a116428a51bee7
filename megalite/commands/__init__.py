"""Commands: one module per program. The scripts pretrain_*.py and those in tools/ call these modules too."""

from __future__ import annotations
