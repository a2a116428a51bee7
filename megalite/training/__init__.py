"""The step of a training run and its state: gradients, update, saving and loading, records, display and profiles."""

from __future__ import annotations
