"""Alarms about single steps: losses and gradients that jump, the samples behind them, and what is done about them."""
