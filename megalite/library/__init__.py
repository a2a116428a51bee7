"""The implementation of the names that `import megalite` offers (docs/library.md)."""
