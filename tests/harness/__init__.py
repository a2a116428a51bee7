"""What the tests stand on: ranks that start in milliseconds, comparisons that explain themselves, covering arrays."""

from __future__ import annotations
