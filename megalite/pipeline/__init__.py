"""Schedules as data and the engine that executes them."""
