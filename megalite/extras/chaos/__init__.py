"""Disturb a command with a schedule of faults, and compare what remains with an undisturbed run of it."""

from __future__ import annotations
