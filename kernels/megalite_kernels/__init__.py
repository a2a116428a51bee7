"""Fused operations of a training step: one file per operation, with Triton kernels in files `..._kernels.py`.

Only this package decides which implementation runs.
"""
