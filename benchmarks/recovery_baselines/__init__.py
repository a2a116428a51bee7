"""Small trainings as people write them with torch's own means, for comparison with what megalite recovers from."""

from __future__ import annotations
