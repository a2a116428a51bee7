"""From text to the samples of a training step: numpy only, in the file format and the sample order of Megatron-LM."""
