"""Parallelism: mesh of ranks, collectives, sharding, parallel layers and keyed randomness."""
