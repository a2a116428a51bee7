"""Tools for the tests: ranks that start within milliseconds, comparisons with clear messages, covering arrays."""

from __future__ import annotations
