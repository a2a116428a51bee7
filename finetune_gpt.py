"""Fine-tune a GPT on conversations or pairs of responses (`--help`): alone, or on ranks under torchrun or SLURM."""

from __future__ import annotations

from megalite.commands.finetune import command

if __name__ == "__main__":
    command()
