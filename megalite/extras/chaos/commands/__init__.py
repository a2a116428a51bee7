"""Command of this room."""

from __future__ import annotations
