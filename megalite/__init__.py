"""megalite: pre-train GPT-like models under any parallel layout."""

from __future__ import annotations
