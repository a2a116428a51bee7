"""Look into a token file, or at a sample of a training run.

    python tools/inspect_dataset.py data/corpus_text_document --verify
    python tools/inspect_dataset.py data/corpus_text_document --document 17 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model
    python tools/inspect_dataset.py --config run/small-llama/config.yaml --sample 17
    python tools/inspect_dataset.py --ledger run/small-llama

The second decodes a document; without a tokenizer it shows the tokens. The third decodes what the run with this
configuration sees as its sample 17, counted from its beginning. The fourth says what a run with --data-mix-schedule
has taken of each source, and proves that nothing was lost or repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megalite.config.tokenizer import TokenizerFlags
from megalite.config.tool_arguments import ALSO_POSITIONAL, parse_tool_arguments
from megalite.entry_points import entry_point
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say


@dataclass(frozen=True)
class Arguments(TokenizerFlags):
    """The flags."""

    prefix: str | None = field(default=None, metadata=ALSO_POSITIONAL)
    """The path of the .bin and .idx without the suffix."""
    document: int | None = None
    """The document to show, from 0."""
    verify: bool = False
    """Check every entry of the index, every checksum that is recorded, and every token."""
    vocab_size: int | None = None
    """Vocabulary size, as for megalite-preprocess."""
    config: str | None = None
    """The config.yaml that a run wrote."""
    sample: int | None = None
    """The sample of the run to show, from 0."""
    ledger: str | None = None
    """A run directory with a mix of data, or one of its checkpoints: show what each source has given, and prove it."""


def main() -> None:
    """Parse the flags and show a dataset or a sample."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.errors import ConfigurationError

    if arguments.ledger is not None:
        if arguments.prefix is not None or arguments.config is not None:
            raise ConfigurationError("--ledger is about a run: leave --prefix and --config out")
        for line in entry_point("ledger_lines")(arguments.ledger):
            say(line)
        return
    if (arguments.prefix is None) == (arguments.config is None):
        raise ConfigurationError("give a --prefix, --config with --sample, or --ledger")
    if (arguments.config is None) != (arguments.sample is None):
        raise ConfigurationError("--config and --sample need each other")
    if arguments.config is not None and arguments.sample is not None:
        show_sample(Path(arguments.config), arguments.sample)
    elif arguments.prefix is not None:
        show_dataset(arguments, arguments.prefix)


def show_dataset(arguments: Arguments, prefix: str) -> None:
    """Show the facts about a dataset, or a document; then check the dataset, if --verify is given."""
    from megalite.data.indexed_dataset import IndexedDataset
    from megalite.preprocessing.inspection import describe, document_tokens, verify

    data = IndexedDataset(prefix)
    if arguments.document is None:
        for name, value in describe(data).items():
            say(f"{name:16} {value}")
    else:
        for sequence in document_tokens(data, arguments.document):
            say(decoded(arguments, prefix, sequence.tolist()))
    if arguments.verify:
        verify(data)
        say("every pointer and every token is right")


def decoded(arguments: Arguments, prefix: str, tokens: list[int]) -> str:
    """Return the text of tokens, or the tokens if no tokenizer is given."""
    from megalite.data.side_file import check_tokenizer, read_side_file
    from megalite.data.tokenizers import build_tokenizer

    if arguments.tokenizer_type is None:
        return " ".join(map(str, tokens))
    tokenizer = build_tokenizer(arguments, arguments.vocab_size)
    check_tokenizer(prefix, read_side_file(prefix), tokenizer.identity())
    return tokenizer.decode(tokens)


def show_sample(config_path: Path, sample: int) -> None:
    """Show the decoded tokens of a run's sample, and how many of them count in the loss."""
    from megalite.config import load_yaml
    from megalite.config.validate import check_numbers
    from megalite.config.yaml_file import read_file
    from megalite.errors import ConfigurationError
    from megalite.training.data import open_data

    config = load_yaml(read_file(str(config_path)), str(config_path))
    check_numbers(config)
    data = open_data(config)
    if not 0 <= sample < len(data.train):
        raise ConfigurationError(f"--sample {sample}: the run has samples 0 to {len(data.train) - 1}")
    fields = data.train[sample]
    counted, length = int((fields["loss_mask"] > 0).sum()), len(fields["tokens"])
    say(f"sample {sample}: {length} tokens, {counted} count in the loss")
    say(data.tokenizer.decode(fields["tokens"].tolist()))


command = partial(run_tool, main)
"""Run the program and exit with its code."""
