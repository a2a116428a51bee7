"""The tests: unit (no process group), distributed (gloo ranks), kernels, end_to_end; and the harness they share."""

from __future__ import annotations
