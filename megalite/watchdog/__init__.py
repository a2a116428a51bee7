"""Detection of runs that hang or die, and of the cause: sections, time limits, and ranks that have gone."""

from __future__ import annotations
