"""Start and end of a run's processes: rendezvous, process groups, stop requests, failures and exit codes."""

from __future__ import annotations
