"""Mixes that change in the course of a run: which source gives each sample, and where each source stands."""
