"""Merge token files into one.

python tools/merge_datasets.py --input data/parts --output-prefix data/corpus_text_document
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megalite.config.tool_arguments import parse_tool_arguments
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    input: tuple[str, ...]
    """Directories, whose .bin and .idx files are merged in the order of their names, or prefixes in the order given."""
    output_prefix: str
    """The prefix of the .bin, .idx and .megalite.json to write."""


def main() -> None:
    """Parse the flags, merge the datasets, and print a summary and the flag to train with."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.preprocessing.merging import find_prefixes, merge

    prefixes = find_prefixes(arguments.input)
    extent = merge(prefixes, arguments.output_prefix)
    say(f"{len(prefixes):,} datasets, {extent.documents:,} documents, {extent.tokens:,} tokens")
    say(f"--data-path {arguments.output_prefix}")


command = partial(run_tool, main)
"""Run the program and exit with its code."""
