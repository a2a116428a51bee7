"""The program as its users meet it: real files, real processes, exit codes, messages."""

from __future__ import annotations
