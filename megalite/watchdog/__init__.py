"""Detection of runs that hang or die, and of the cause: sections, time limits, and ranks that are lost."""

from __future__ import annotations
