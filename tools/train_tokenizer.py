"""Train a SentencePiece tokenizer on JSON lines.

python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8000 --output-prefix data/tokenizer
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.config.tool_arguments import parse_tool_arguments, run_tool


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    input: tuple[str, ...]
    """Files of one JSON object a line; those that end in .gz are decompressed."""
    vocab_size: int
    """Pieces of the tokenizer; 256 of them are bytes, 3 are special."""
    output_prefix: str
    """Where to write: PREFIX.model and PREFIX.vocab."""
    json_keys: tuple[str, ...] = ("text",)
    """The fields of a line to train on."""
    model_type: Literal["bpe", "unigram"] = "bpe"
    """The kind of model."""
    num_threads: int = 1
    """Threads; more than one may give another result every time."""


def main() -> None:
    """Parse, train, and say how to use the tokenizer."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.data.tokenizer_training import train_tokenizer
    from megalite.errors import ConfigurationError

    if arguments.vocab_size < 1 or arguments.num_threads < 1:
        raise ConfigurationError("--vocab-size and --num-threads are 1 or more")
    pieces = train_tokenizer(
        arguments.input,
        arguments.json_keys,
        arguments.output_prefix,
        arguments.vocab_size,
        arguments.model_type,
        arguments.num_threads,
    )
    print(f"{pieces:,} pieces")
    print(f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {arguments.output_prefix}.model")


if __name__ == "__main__":
    run_tool(main)
