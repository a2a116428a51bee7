"""The current process: stop signals, calls with time limits, host and sockets, rank and world size, output."""

from __future__ import annotations
