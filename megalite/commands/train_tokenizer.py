"""Train a tokenizer on a corpus.

python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8000 --output-prefix data/tokenizer
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from megalite.config.fields import PositiveInt, Workers
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    input: tuple[str, ...]
    """Files, patterns or directories: JSON lines, .txt (a file is a document), also as .gz or .zst, and .parquet."""
    vocab_size: PositiveInt
    """Number of tokens; 256 of them are bytes, and a few are special."""
    output_prefix: str
    """Path of the output: PREFIX.model and PREFIX.vocab, or PREFIX/tokenizer.json for byte-level-bpe."""
    json_keys: tuple[str, ...] = ("text",)
    """The fields of a record to train on."""
    model_type: Literal["bpe", "unigram", "byte-level-bpe"] = "bpe"
    """Kind of tokenizer: a SentencePiece model of two kinds, or byte-level BPE for Hugging Face's tokenizers."""
    num_threads: Workers = 1
    """Threads; more than one may give another SentencePiece model every time."""


def main() -> None:
    """Parse the flags, train the tokenizer, and print the flags to use it with."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.preprocessing.tokenizer_training import train_byte_level_bpe, train_tokenizer

    corpus = (arguments.input, arguments.json_keys, arguments.output_prefix, arguments.vocab_size)
    if arguments.model_type == "byte-level-bpe":
        pieces = train_byte_level_bpe(*corpus, arguments.num_threads)
        use = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {arguments.output_prefix}"
    else:
        pieces = train_tokenizer(*corpus, arguments.model_type, arguments.num_threads)
        use = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {arguments.output_prefix}.model"
    say(f"{pieces:,} pieces")
    say(use)


command = partial(run_tool, main)
"""Run the program and exit with its code."""
