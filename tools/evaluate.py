"""Measure how well a model predicts text, and its results in the tasks of lm_eval."""

from __future__ import annotations

from megalite.commands.evaluate import command

if __name__ == "__main__":
    command()
