"""A run from the start of its processes to its exit code: the loop, evaluations, and the seam of synchronization."""

from __future__ import annotations
