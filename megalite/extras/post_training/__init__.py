"""Training with a loss of one's own, generation with the weights that are trained, and their export."""
