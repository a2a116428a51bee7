"""What tells a run that hangs or dies from one that works, and says why: sections, limits, and who has gone."""

from __future__ import annotations
