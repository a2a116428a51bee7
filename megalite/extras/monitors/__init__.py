"""Monitors of a run: memory by kind and its growth, shares of a step."""
