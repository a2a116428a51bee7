"""Tests of the complete program: real files, real processes, exit codes, messages."""

from __future__ import annotations
