"""Folder that stands first in PYTHONPATH of a disturbed command: it holds `sitecustomize.py` and nothing else."""

from __future__ import annotations
