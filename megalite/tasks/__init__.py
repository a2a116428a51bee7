"""Tasks: what a run trains, with its network, its loss and its data."""

from __future__ import annotations
