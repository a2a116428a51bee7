"""Training: the training loop, the trainer, resuming, metrics, the display and profiling."""

from __future__ import annotations
