"""Costs and rules of each kind of layer, one file a kind: what needs no torch to be known."""
