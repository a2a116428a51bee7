"""Data from text to the samples of a training step: numpy only, in Megatron-LM's file format and sample order."""
