"""Preparation of datasets: text encoded, written, merged, inspected; tokenizers trained."""
