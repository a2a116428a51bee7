"""Comparison of measured runs: over numbers of ranks, and between methods of synchronization."""
