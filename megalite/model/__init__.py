"""The transformer, from parallel layers."""
