"""Pre-train a GPT, with Megatron-LM's flags (`--help`): alone, or on many ranks under torchrun or SLURM."""

from __future__ import annotations

from megalite.commands.pretrain import command

if __name__ == "__main__":
    command()
