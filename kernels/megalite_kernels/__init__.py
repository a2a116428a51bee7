"""The fused operations of a training step, one file an op; which implementation runs is decided here alone."""
