"""Pre-train as `pretrain_hybrid.py` does: its name in earlier releases of Megatron-LM."""

from __future__ import annotations

from megalite.commands.pretrain_hybrid import command

if __name__ == "__main__":
    command()
