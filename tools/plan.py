"""Find the fastest layouts of a run on a cluster that fit, before it starts."""

from __future__ import annotations

from megalite.commands.plan import command

if __name__ == "__main__":
    command()
