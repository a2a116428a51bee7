"""Data parallelism that communicates less: what a bucket's gradients become before they travel."""
