"""Where a rank stands and how ranks talk: mesh, collectives, sharding, parallel layers, keyed randomness."""
