"""Start and end of a process of a run: rendezvous, process groups, requests to stop, failures and exit codes."""

from __future__ import annotations
