"""This process: signals that ask it to stop, calls that may not come back, where it runs."""

from __future__ import annotations
