"""Search for silent corruption: hashes of weights that ranks share, and gradients that are computed or summed twice."""
