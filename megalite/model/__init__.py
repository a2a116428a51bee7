"""The transformer, built from parallel layers."""
