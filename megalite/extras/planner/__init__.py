"""Prediction of a run before it starts: what a rank holds, sends and computes, and how long a step takes."""
