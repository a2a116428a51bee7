"""Programs of verification: one module per command."""
