"""Readers of traces: one file for each program that writes them."""
