"""State and activations in host memory: page-locked buffers, and copies beside the computation."""

from __future__ import annotations
