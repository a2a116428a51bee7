"""Whether the nodes, what is between them, and what the ranks were started with are fit for a run, before it begins."""

from __future__ import annotations
