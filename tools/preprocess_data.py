"""Tokenize JSON lines into the .bin and .idx files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model --workers 8
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.config.tool_arguments import parse_tool_arguments, run_tool


@dataclass(frozen=True)
class Arguments:
    """The flags, named as Megatron-LM's."""

    input: tuple[str, ...]
    """Files of one JSON object a line; those that end in .gz are decompressed."""
    output_prefix: str
    """Where to write: PREFIX_KEY_document.bin, .idx and .json for every key."""
    tokenizer_type: str
    """SentencePieceTokenizer (also as Llama2Tokenizer), ByteTokenizer or NullTokenizer."""
    tokenizer_model: str | None = None
    """The model file of a SentencePiece tokenizer."""
    vocab_size: int | None = None
    """The number of tokens of a NullTokenizer."""
    json_keys: tuple[str, ...] = ("text",)
    """The fields of a line to tokenize, each into files of its own."""
    append_eod: bool = False
    """End every document with the end-of-document token."""
    workers: int = 1
    """Processes that tokenize. The output does not depend on it."""
    log_interval: int = 1000
    """Documents between two lines of progress where the output is not a terminal."""


def main() -> None:
    """Parse, preprocess, and say what to train with."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.data.preprocess import Encoding, output_prefix_of, preprocess
    from megalite.data.preprocess_progress import show_progress
    from megalite.errors import ConfigurationError

    if arguments.workers < 1 or arguments.log_interval < 1:
        raise ConfigurationError("--workers and --log-interval are 1 or more")
    encoding = Encoding(
        arguments.json_keys,
        arguments.append_eod,
        arguments.tokenizer_type,
        arguments.tokenizer_model,
        arguments.vocab_size,
    )
    with show_progress(arguments.input, arguments.log_interval) as report:
        total = preprocess(arguments.input, arguments.output_prefix, encoding, arguments.workers, report)
    rate = total.tokens / max(total.seconds, 1e-9)
    print(f"{total.documents:,} documents, {total.tokens:,} tokens, {rate:,.0f} tokens/s")
    for key in arguments.json_keys:
        print(f"--data-path {output_prefix_of(arguments.output_prefix, key)}")


if __name__ == "__main__":
    run_tool(main)
