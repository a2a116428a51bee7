"""Optimization: flat parameter and gradient buffers, the distributed optimizer, clipping, the learning rate."""

from __future__ import annotations
