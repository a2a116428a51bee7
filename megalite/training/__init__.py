"""Training: the loop and what stands around it: metrics, the screen, failures."""

from __future__ import annotations
