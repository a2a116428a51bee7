"""Reports of runs: pages, pictures and numbers that follow from their records."""
