"""The fused operations of a training step, one file an op with its kernels beside it.

Which implementation runs is decided here alone.
"""
