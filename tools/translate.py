"""Translate a launch script of Megatron-LM, or settings of DeepSpeed, FSDP or Accelerate, into megalite's flags."""

from __future__ import annotations

from megalite.commands.translate import command

if __name__ == "__main__":
    command()
