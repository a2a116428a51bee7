"""Help of `pretrain_gpt.py`: a page to begin with, and the flags of each section of the configuration as a topic."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NoReturn

from megalite.config.fields import flag_of
from megalite.config.help import field_docstrings, show_help, width
from megalite.config.run import RunConfig, fields_by_name, section_types
from megalite.config.yaml_file import nearest
from megalite.errors import ConfigurationError
from megalite.process.names import as_installed
from megalite.process.output import say

ALL = "all"
_DESCRIPTION = """\
Pre-train a GPT. The flags are Megatron-LM's: those not listed here are accepted with a note if they change nothing, and
refused with the reason otherwise. --config FILE reads a YAML file of the same fields by section (model, parallel, ...),
which flags override. Short names: --tp, --pp, --cp, --ep, --etp.

--dry-run builds one rank (--rank, by default 0) of --world-size ranks without a device, runs a step in which nothing is
computed, and prints what the rank holds, sends and computes; --dry-run-json FILE writes all of it.
--as-rank R --of N runs a few steps of rank R of N on this device, as if the other ranks were there.
"""
_FIRST = "Pre-train a GPT, with Megatron-LM's flags. --config FILE reads them from YAML. A first run, on made-up data:"
EXAMPLE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 4 --lr 1e-3 --train-iters 20 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1000"
)
"""Flags of a run that takes seconds on any machine and needs no files."""
_USUAL = ("train_iters", "global_batch_size", "data_path", "tokenizer_type", "tokenizer_model", "save", "resume")


def show_run_help(topics: Sequence[str]) -> NoReturn:
    """Print the flags of these topics; without a topic, those that are needed first, and the topics.

    Raises:
        ConfigurationError: there is no such topic.
        SystemExit: 0 otherwise.
    """
    kinds, titles = section_types(), field_docstrings(RunConfig)
    for topic in topics:
        if topic not in (*kinds, ALL):
            raise ConfigurationError(f"--help {topic}: {_instead(topic)}")
    if topics:
        shown = kinds if ALL in topics else {name: kinds[name] for name in topics}
        about = _DESCRIPTION if ALL in topics else " ".join(titles[name] for name in shown)
        show_help(about, {f"{name} options": kind for name, kind in shown.items()})
    required = [name for name, place in fields_by_name().items() if place.required]
    words = textwrap.wrap(f"python pretrain_gpt.py {EXAMPLE}", width() - 8, break_on_hyphens=False)
    lines = [f"usage: {sys.argv[0]} [flags] [--help [TOPIC...]]", ""]
    lines += [*textwrap.wrap(_FIRST, width()), "", "  " + " \\\n      ".join(words)]
    lines += ["", "must be given:", *_rows((flag_of(name), _meaning(name)) for name in required)]
    lines += ["", "most runs have, too:", *_rows((flag_of(name), _meaning(name)) for name in _USUAL)]
    lines += ["", "topics, for --help TOPIC:", *_rows((name, titles[name].rstrip(".")) for name in kinds)]
    say(as_installed("\n".join([*lines, *_rows([(ALL, "Every flag, and how to try a layout without its ranks")])])))
    sys.exit(0)


def _instead(word: str) -> str:
    """Return what to ask for in place of a word that is no topic."""
    place = fields_by_name().get(word.lstrip("-").replace("-", "_"))
    if place is not None:
        return f"this flag is in --help {place.section}"
    topics = [*section_types(), ALL]
    return f"there is no such topic{nearest(word, topics)}; there are {', '.join(topics[:-1])}, and {ALL}"


def _meaning(name: str) -> str:
    """Return the first clause of a flag's description."""
    clause, *_ = re.split(r"; |\. ", field_docstrings(section_types()[fields_by_name()[name].section])[name])
    return clause.rstrip(".")


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return names and their meanings in two columns that stand in the same place in all lists of the page."""
    indent = " " * 26
    return [
        textwrap.fill(words, width(), initial_indent=f"  {name:24}", subsequent_indent=indent) for name, words in rows
    ]
