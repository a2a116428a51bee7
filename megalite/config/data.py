"""Data that the run reads: token files or mock data, their order and masks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megalite.config.tokenizer import TokenizerFlags
from megalite.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class DataConfig(TokenizerFlags):
    """The samples: tokens on disk cut to one length, and how documents inside a sample see each other."""

    seq_length: int
    """Tokens of a training sample."""
    data_path: tuple[str, ...] = ()
    """Prefixes of .bin and .idx files; of several, each with its weight before it or none."""
    train_data_path: tuple[str, ...] = ()
    """The same for training alone, instead of data-path with split."""
    valid_data_path: tuple[str, ...] = ()
    """The same for validation."""
    test_data_path: tuple[str, ...] = ()
    """The same for the test at the end of training."""
    data_args_path: str | None = None
    """A file that holds what would follow data-path."""
    per_split_data_args_path: str | None = None
    """A JSON file of what would follow train-, valid- and test-data-path, under "train", "valid" and "test"."""
    data_cache_path: str | None = None
    """Directory of the sample indices; unset: a folder `cache` beside the data."""
    sft: bool = False
    """The data are JSONL files of conversations; the loss counts on answers only."""
    chat_template: str | None = None
    """With sft: Jinja template of a conversation, or a file that holds it; unset: the tokenizer's."""
    fim_data: bool = False
    """Rearrange documents to fill in their middle."""
    fim_rate: float = 0.5
    """Share of documents that are rearranged."""
    fim_spm_rate: float = 0.5
    """Share of those that are in the order suffix, prefix, middle; the others: prefix, suffix, middle."""
    fim_split_sample: str | None = None
    """Token that divides a document into fragments, each rearranged by itself."""
    fim_fragment_rate: float | None = None
    """Share of fragments that are rearranged in documents that are; unset: fim-rate."""
    fim_no_prefix: str | None = None
    """Leave texts that begin so as they are."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that fills up samples that become shorter; no loss counts there."""
    fim_eod_token: str | None = None
    """Token that ends documents; unset: the tokenizer's."""
    mid_level_dataset_surplus: float = 0.005
    """Share that is drawn from each dataset of a blend beyond its weight."""
    mock_data: bool = False
    """Train on generated tokens instead of files."""
    split: str = "969, 30, 1"
    """Shares of the data for training, validation and test."""
    num_workers: int = 2
    """Threads that read the next step's samples ahead; 0: none."""
    mmap_bin_files: bool = True
    """Map the .bin files into memory instead of reading them piece by piece."""
    reset_position_ids: bool = False
    """Positions start again at 0 after each end of document."""
    reset_attention_mask: bool = False
    """Tokens attend only to their own document."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""

    @property
    def divided(self) -> bool:
        """True if `split` divides one blend into training, validation and test."""
        return bool(self.data_path or self.data_args_path)

    def split_shares(self) -> tuple[float, float, float]:
        """The shares of training, validation and test as written, 0 where left out. Raises ConfigurationError."""
        return split_shares(self.split)


def split_shares(split: str) -> tuple[float, float, float]:
    """The shares in a `--split`. Megatron-LM would read more spellings, and 1e2 as a 1 and a 2.

    Raises:
        ConfigurationError: there are none, too many, none for training, or something is no plain number.
    """
    words = split.replace(",", " ").split()
    numbers = all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in words)
    if not numbers or not 1 <= len(words) <= 3 or float(words[0]) == 0:
        raise ConfigurationError(f"--split {split!r}: give the shares of training, validation and test: 969,30,1")
    train, valid, test = map(float, (*words, "0", "0")[:3])
    return train, valid, test
