"""Right steps of several programs, on drawn networks and layouts, and the verdict on each: `make fuzz-layouts`."""
