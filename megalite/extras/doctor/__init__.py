"""Check, before a run, that the nodes, the network between them and the ranks' settings are fit for it."""

from __future__ import annotations
