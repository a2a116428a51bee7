"""Models of others, into megalite and out of it."""
