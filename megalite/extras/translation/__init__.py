"""Translation of other programs' launch scripts and settings into megalite's flags. What is read is never executed."""

from __future__ import annotations
