"""Averages of checkpoints."""
