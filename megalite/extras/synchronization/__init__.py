"""Data parallelism that communicates less than the sum of all gradients in each step."""
