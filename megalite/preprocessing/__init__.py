"""Preparation of datasets: encoding text, writing, merging and inspecting token files, and training tokenizers."""
