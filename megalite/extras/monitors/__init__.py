"""Monitors of a run: sums of gradients that are checked, memory by kind and its growth, shares of a step."""
