"""Pre-train layers of a pattern, with Megatron-LM's flags (`--help`): alone, or on ranks under torchrun or SLURM."""

from __future__ import annotations

from megalite.commands.pretrain_hybrid import command

if __name__ == "__main__":
    command()
