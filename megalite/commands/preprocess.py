"""Tokenize a corpus into the .bin and .idx files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model --workers 8

A run that was stopped leaves its finished work in PREFIX.partial; the same command with --resume continues it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from functools import partial

from megalite.config.fields import CORES, PositiveInt, Workers
from megalite.config.tokenizer import EncodingFlags
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say

MEGATRON_FLAGS = {
    "tokenizer-hf-no-include-special-tokens": "--no-tokenizer-hf-include-special-tokens",
    "use-gigatoken": "--fast-encoding=require",
}
"""Other names of flags. This table and the next two have precedence over the table of pretrain_gpt.py."""
ALREADY_SO = {
    "partitions": "one reader keeps all workers busy",
    "keep-sequential-samples": "the order of the input is always kept",
    "tokenizer-hf-use-fast": "it is the only kind",
    **dict.fromkeys(
        ("make-vocab-size-divisible-by", "padded-vocab-size", "no-pad-vocab-size", "disable-pad-vocab-size"),
        "only a model pads its vocabulary: data have the tokenizer's own numbers",
    ),
}
REFUSED = {
    "chat-template": "is for training: pretrain_gpt.py --sft reads conversations as they are, in JSON lines",
    **dict.fromkeys(("split-sentences", "keep-newlines", "lang"), "is for BERT: give sentences as a list of texts"),
    **dict.fromkeys(
        ("find-optimal-num-workers", "workers-to-check", "max-documents", "performance-dir"),
        "is not supported: one worker for each core, the default, is the fastest",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Arguments(EncodingFlags):
    """The flags, with Megatron-LM's names."""

    input: tuple[str, ...]
    """Files, patterns or directories: JSON lines, .txt (a file is a document), also as .gz or .zst, and .parquet."""
    output_prefix: str
    """Prefix of the output: PREFIX_KEY_document.bin, .idx and .megalite.json for every key."""
    workers: Workers = CORES
    """Processes that tokenize; by default one per core. The output does not depend on it."""
    log_interval: PositiveInt = 10_000
    """Documents between two lines of progress if the output is not a terminal."""
    resume: bool = False
    """Continue a stopped run with the same flags, if there is one."""


def settle_megatron_flags(argv: list[str]) -> list[str]:
    """Return the command line with Megatron-LM's flags translated or removed; print a line about each removed flag.

    Raises:
        ConfigurationError: a flag is refused.
    """
    from megalite.config import megatron_flags
    from megalite.config.command_line import flag_groups
    from megalite.errors import ConfigurationError

    own = {each.name.replace("_", "-") for each in fields(Arguments)}
    settled: list[str] = []
    for name, values in flag_groups(argv):
        if name in REFUSED:
            raise ConfigurationError(f"--{name} {REFUSED[name]}")
        note = megatron_flags.Note(f"--{name}", f"already so, {ALREADY_SO[name]}") if name in ALREADY_SO else None
        if not note and name not in own and name not in MEGATRON_FLAGS:
            note = megatron_flags.settled(name, values)
        if note:
            say(f"{note.flag}: {note.why}", to_error=True)
        else:
            settled += [*([MEGATRON_FLAGS.get(name, f"--{name}")] if name else []), *values]
    return settled


def main() -> None:
    """Parse the flags, preprocess the corpus, and print a summary and the flags to train with."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "", argv=settle_megatron_flags(sys.argv[1:]))
    from megalite.preprocessing.preprocess import output_prefix_of, preprocess

    flags = EncodingFlags(**{field.name: getattr(arguments, field.name) for field in fields(EncodingFlags)})
    output, lengths, tokens_per_second = preprocess(
        arguments.input, arguments.output_prefix, flags, arguments.workers, arguments.log_interval, arguments.resume
    )
    say(f"{output.documents:,} documents, {output.tokens:,} tokens, {tokens_per_second:,.0f} tokens/s")
    if output.tokens:
        say(f"{output.text_bytes / output.tokens:.2f} bytes per token; sequences of {lengths}")
    if output.skipped:
        say(f"{output.skipped:,} bad lines were left out")
    for key in arguments.json_keys:
        say(f"--data-path {output_prefix_of(arguments.output_prefix, key)}")


command = partial(run_tool, main)
"""Run the program and exit with its code."""
