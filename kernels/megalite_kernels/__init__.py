"""Fused operations of a training step. Each operation has one file, and its Triton kernels are in a second file.

Only this package decides which implementation runs.
"""
