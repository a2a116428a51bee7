"""Plain torch modules as stages of the engine."""
