"""Write text with a trained model."""

from __future__ import annotations

from megalite.commands.generate import command

if __name__ == "__main__":
    command()
