"""The planner against published measurements."""
