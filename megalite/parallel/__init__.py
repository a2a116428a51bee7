"""Places of ranks and communication between them: mesh, collectives, sharding, parallel layers, keyed randomness."""
