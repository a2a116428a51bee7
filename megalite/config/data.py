"""Data that the run reads: token files or mock data, their order and masks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, get_args

from megalite.config.fields import NonNegativeFloat, NonNegativeInt, PositiveInt, Share, at_most, flag_of, needs
from megalite.config.loss_weights import loss_weight_problems
from megalite.config.tokenizer import FILES_AND_OPTIONS, TokenizerFlags, TokenizerType
from megalite.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class DataConfig(TokenizerFlags):
    """Options of the samples: token files, sequence length, and attention and loss masks of documents in a sample."""

    seq_length: PositiveInt
    """Tokens of a training sample."""
    data_path: tuple[str, ...] = ()
    """Prefixes of .bin and .idx files. If there are several, all or none have their weight before them."""
    train_data_path: tuple[str, ...] = ()
    """Prefixes for training only, instead of data-path with split."""
    valid_data_path: tuple[str, ...] = ()
    """Prefixes for validation."""
    test_data_path: tuple[str, ...] = ()
    """Prefixes for the test at the end of training."""
    data_args_path: str | None = None
    """File with the arguments of data-path."""
    per_split_data_args_path: str | None = None
    """JSON file with the arguments of train-, valid- and test-data-path under "train", "valid" and "test"."""
    data_mix_schedule: str | None = None
    """YAML file of sources, and of the weights with which they are mixed from which token on, instead of data-path."""
    allow_changed_sources: bool = False
    """Continue although the files of a source of the mix have changed: that source begins anew."""
    phase_transition_iterations: str | None = None
    """Steps after which later phases of data-mix-schedule begin, separated by commas; the file must say the same."""
    data_cache_path: str | None = None
    """Directory of the sample indices; unset: `cache` in the directory of the data."""
    preference_data: tuple[str, ...] = ()
    """JSONL files of pairs of responses to a prompt, a chosen and a rejected one, instead of data-path."""
    sft: bool = False
    """Train on JSONL files of conversations; only answers count in the loss."""
    chat_template: str | None = None
    """Jinja template of a conversation, or a file that contains it, for sft and preference-data; unset: the
    tokenizer's."""
    fim_data: bool = False
    """Rearrange documents for fill in the middle."""
    fim_rate: Share = 0.5
    """Share of documents that are rearranged."""
    fim_spm_rate: Share = 0.5
    """Share of those with the order suffix, prefix, middle; the others have prefix, suffix, middle."""
    fim_split_sample: str | None = None
    """Token that divides a document into fragments, which are rearranged separately."""
    fim_fragment_rate: Share | None = None
    """Share of the fragments of rearranged documents that are rearranged; unset: fim-rate."""
    fim_no_prefix: str | None = None
    """Do not rearrange texts that start with this."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that pads samples that become shorter; it does not count in the loss."""
    fim_eod_token: str | None = None
    """Token that ends documents; unset: the tokenizer's."""
    mid_level_dataset_surplus: NonNegativeFloat = 0.005
    """Share of additional samples to draw from each dataset of a blend, beyond its weight."""
    mock_data: bool = False
    """Train on generated tokens instead of files."""
    split: str = "969, 30, 1"
    """Shares of the data for training, validation and test."""
    num_workers: Annotated[NonNegativeInt, at_most(1_000)] = 2
    """Threads that read the samples of the next step in advance; 0: none."""
    mmap_bin_files: bool = True
    """Map the .bin files into memory instead of reading them piece by piece."""
    reset_position_ids: bool = False
    """Restart positions at 0 after each end of document."""
    reset_attention_mask: bool = False
    """Let tokens attend only to their own document."""
    loss_weights: tuple[str, ...] = ()
    """Weights NAME=WEIGHT of tokens in the loss of training, by source of a blend, or by role with sft; other sources
    have 1, and of other roles assistant 1 and the rest 0."""
    eod_mask_loss: bool = False
    """Mask the loss at positions whose input is the end-of-document token."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens before which texts from the checkpoint end, beside the tokenizer's end of a document; unset: those that a
    Hugging Face folder in load names."""

    @property
    def divided(self) -> bool:
        """True if `split` divides one blend, or the sources of a mix, into training, validation and test."""
        is_mixed = self.data_mix_schedule is not None and not (self.valid_data_path or self.test_data_path)
        return bool(self.data_path or self.data_args_path or self.preference_data) or is_mixed


def split_shares(split: str) -> tuple[float, float, float]:
    """Return the shares in a `--split`; 0 if not given.

    Any text may stand between them, as in Megatron-LM: 969,30,1 or 969/30/1 or [969, 30, 1]. Letters and signs
    are refused: Megatron-LM reads 1e2 as the shares 1 and 2.

    Raises:
        ConfigurationError: there are no shares, too many, none for training, or a share is not a plain number.
    """
    words = [] if re.search(r"[\w+-]", re.sub(r"[\d]", "", split)) else re.findall(r"[.0-9]+", split)
    numbers = all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in words)
    if not numbers or not 1 <= len(words) <= 3 or float(words[0]) == 0:
        raise ConfigurationError(f"--split {split!r}: give the shares of training, validation and test, as in 969,30,1")
    train, valid, test = map(float, (*words, "0", "0")[:3])
    return train, valid, test


def data_problems(data: DataConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    mixed = data.data_mix_schedule is not None
    each = any((data.train_data_path, *(() if mixed else (data.valid_data_path, data.test_data_path))))
    one_blend = data.data_path, data.data_args_path, data.per_split_data_args_path
    ways = sum(map(bool, (*one_blend, each, data.mock_data, mixed, data.preference_data)))
    if ways == 0:
        yield "there is no data: give --data-path, --data-mix-schedule, --preference-data or --mock-data"
    elif ways > 1:
        yield (
            "the data is given in more than one way: keep one of --data-path, --data-args-path, --train-data-path "
            "(with --valid-data-path and --test-data-path), --per-split-data-args-path, --data-mix-schedule (with "
            "--valid-data-path and --test-data-path), --preference-data and --mock-data"
        )
    if each and not data.train_data_path:
        yield "--valid-data-path and --test-data-path need --train-data-path"
    if data.split != DataConfig.split and not (data.divided or data.mock_data):
        yield (
            f"--split {data.split!r} divides --data-path, --data-args-path, or --data-mix-schedule without "
            "--valid-data-path: leave it out"
        )
    try:
        split_shares(data.split)
    except ConfigurationError as error:
        yield str(error)
    yield from loss_weight_problems(data.loss_weights, sft=data.sft, mock_data=data.mock_data)
    yield from _forms_of_data(data)


def _forms_of_data(data: DataConfig) -> Iterator[str]:
    """Yield a line for each option that does not fit the form of the data: conversations, texts with gaps, a mix."""
    if data.sft and (data.mock_data or data.fim_data):
        yield f"--sft reads conversations: leave {'--mock-data' if data.mock_data else '--fim-data'} out"
    if data.sft and data.eod_mask_loss:
        yield "--eod-mask-loss is for token files: with --sft only answers have a loss"
    if data.sft and data.data_mix_schedule is not None:
        yield "--data-mix-schedule mixes token files: with --sft give the conversations by --data-path"
    if data.data_mix_schedule is None:
        yield from needs(data, "allow_changed_sources", "--data-mix-schedule")
        yield from needs(data, "phase_transition_iterations", "--data-mix-schedule")
    if not (data.sft or data.preference_data):
        yield from needs(data, "chat_template", "--sft or --preference-data")
    if not data.fim_data:
        yield from needs(data, "fim_*", "--fim-data")


def tokenizer_problems(data: DataConfig, vocab_size: int | None) -> Iterator[str]:
    """Yield a line for each flag that the tokenizer needs and is missing, or that is given and not read."""
    kind = data.tokenizer_type
    if kind is None:
        yield f"give --tokenizer-type: {', '.join(get_args(TokenizerType))}"
        return
    if kind == "GPT2BPETokenizer" and data.merge_file is None and str(data.vocab_file).endswith(".txt"):
        yield (
            f"--vocab-file {data.vocab_file} is named as a WordPiece vocabulary, which is BERT's: megalite pre-trains "
            "GPTs, whose GPT2BPETokenizer has a vocab.json and a merges.txt"
        )
        return
    for name, kinds in FILES_AND_OPTIONS.items():
        value, reads = getattr(data, name), kind in kinds.split()
        flag = flag_of(name)
        if reads and value is None:
            yield f"--tokenizer-type {kind} needs {flag}, its file"
        elif not reads and value != getattr(DataConfig, name):
            given = " ".join(value) if isinstance(value, tuple) else value
            yield f"--tokenizer-type {kind} does not use {flag} ({given}): leave it out"
    if kind == "NullTokenizer" and vocab_size is None:
        yield "--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens in the data"


def evaluation_problems(data: DataConfig, eval_iters: int) -> Iterator[str]:
    """Yield a line if evaluations are configured but there is no validation data."""
    with suppress(ConfigurationError):  # `data_problems` reports a split that cannot be parsed
        if eval_iters and data.divided and split_shares(data.split)[1] == 0:
            yield f"--split {data.split!r} leaves nothing to validate on: give a second share, or --eval-iters 0"
    is_given = data.train_data_path or (data.data_mix_schedule is not None and data.test_data_path)
    if eval_iters and is_given and not data.valid_data_path:
        yield "there is nothing to validate on: give --valid-data-path, or --eval-iters 0"
