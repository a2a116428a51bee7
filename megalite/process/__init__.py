"""This process: signals that ask it to stop, calls that may not come back, where it runs and who it is among others."""

from __future__ import annotations
