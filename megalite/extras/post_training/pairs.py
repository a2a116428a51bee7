"""Pairs of responses to a prompt, a chosen and a rejected one, packed into sequences.

A line of a file has

    {"prompt": text, "chosen": text, "rejected": text}
    {"prompt": [message, ...], "chosen": [message, ...], "rejected": [message, ...]}
    {"chosen": [message, ...], "rejected": [message, ...]}

The last form has whole conversations; the messages with which both begin are the prompt. A pair is two conversations
(`megalite.data.sft_dataset`), of which the response alone counts, and both stand in one sequence. Pairs are never cut:
those that do not fit into a sequence are left out, with a note, as are those of equal responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalite.config.data import DataConfig
from megalite.data.chat import ANSWERS, ChatTemplate
from megalite.data.dataset_spec import read_dataset_specs
from megalite.data.datasets import Datasets, Samples, Source, build_datasets
from megalite.data.fields import SampleFields
from megalite.data.index_cache import Arrays, IndexCache
from megalite.data.sft_dataset import ConversationFile, SFTDataset, pack
from megalite.data.tokenizers import Tokenizer
from megalite.errors import DataError

SCORES = ("score_chosen", "score_rejected", "chosen_score", "rejected_score", "chosen_rating", "rejected_rating")
"""Fields with scores of the responses, which the losses do not use."""


class PairFile(ConversationFile):
    """JSONL file of pairs. The conversations 2 p and 2 p + 1 are the chosen and the rejected response of pair p.

    Attributes:
        first: number of its first response among those of all files.
        pairs: int64, those to train on.
        left_out: why others are left out, and how many.

    Raises DataError: the file cannot be read, a line is not a pair, or there is no pair to train on.
    """

    kind, of_line = "pairs of responses", 2
    first = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.whole = self.ends - self.begins - 1  # places of a conversation that is not cut
        lengths, rest = self.whole.reshape(-1, 2).sum(1), np.ones(len(self) // 2, bool)
        self.left_out: dict[str, int] = {}
        for why, these in {
            f"are longer than --seq-length {self.sequence_length}": lengths > self.sequence_length,
            "have two equal responses": self._equal(),
            "have a response without an answer of its own": ~self.answered.reshape(-1, 2).all(1),
        }.items():
            if count := np.count_nonzero(rest & these):
                self.left_out[why] = int(count)
            rest &= ~these
        self.pairs = np.flatnonzero(rest)
        if not len(self.pairs):
            found = ", ".join(f"{count} {why}" for why, count in self.left_out.items())
            raise DataError(
                f"{self.path} has no pair to train on: of {len(rest)}, {found} (the shortest has {lengths.min()} "
                "tokens): give other pairs, or a larger --seq-length"
            )

    def _equal(self) -> np.ndarray:
        """Return whether the responses of each pair are equal, so that their margin is 0 whatever is learned."""
        found = np.equal(*self.whole.reshape(-1, 2).T)
        for pair in np.flatnonzero(found):
            ours, theirs = (self.tokens[self.begins[n] : self.ends[n]] for n in (2 * pair, 2 * pair + 1))
            found[pair] = np.array_equal(ours, theirs)
        return found

    @staticmethod
    def conversations(record: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Return the chosen and the rejected one. Raises ValueError if the record is not a pair."""
        fields = {name: value for name, value in record.items() if value is not None and name not in SCORES}
        responses = [fields.pop(name, None) for name in ("chosen", "rejected")]
        for name in ("messages", "completion"):  # some data sets repeat the chosen response
            if fields.pop(name, responses[0]) != responses[0]:
                raise ValueError(f'it has "{name}" beside "chosen" and "rejected", which would not be used: remove it')
        prompt = fields.pop("prompt", None)
        if isinstance(prompt, str) and all(isinstance(each, str) for each in responses):
            return [{**fields, "prompt": prompt, "completion": each} for each in responses]
        if not all(isinstance(each, list) and each for each in responses):
            raise ValueError('a pair has a "prompt", a "chosen" and a "rejected" response: texts, or lists of messages')
        if isinstance(prompt, list):
            whole = [[*prompt, *each] for each in responses]
            shared = len(prompt)
        else:  # a prompt that is a text repeats that of a message
            whole, shared = responses, 0
            most = min(map(len, whole)) - (whole[0] == whole[1])  # of equal ones the last message is the response
            fields |= {} if prompt is None else {"prompt": prompt}
            while shared < most and whole[0][shared] == whole[1][shared]:
                shared += 1
        return [{**fields, "messages": [*map(_asked, each[:shared]), *each[shared:]]} for each in whole]

    def notes(self) -> list[str]:
        of = f"of {len(self) // 2} pairs"
        return [f"{self.path}: {count} {of} {why} and are left out" for why, count in self.left_out.items()]

    def dataset(self, sequences: range, num_samples: int | None) -> PairDataset:
        """Return a dataset of at least `num_samples` samples of these of `pairs`; None: the samples of one epoch."""
        description = self.description | {
            "kind": "packed pairs of responses",
            "pairs": [sequences.start, sequences.stop],
            "num_samples": num_samples,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
        }

        def build() -> Arrays:
            pairs = self.pairs[sequences.start : sequences.stop]
            order, starts = pack(self.whole.reshape(-1, 2).sum(1)[pairs], self.sequence_length, num_samples, self.seed)
            return {"order": (2 * pairs[order][:, None] + [0, 1]).reshape(-1), "starts": 2 * starts}

        arrays = self.cache.get(self.path, description, build)
        return PairDataset(self, arrays["order"], arrays["starts"])


def _asked(message: Any) -> Any:
    """Return a message of the prompt: an answer in it does not count."""
    is_answer = isinstance(message, dict) and message.get("role") == ANSWERS
    return {**message, "weight": 0} if is_answer else message


@dataclass(frozen=True)
class PairDataset(SFTDataset):
    """Sequences of packed pairs, with the response of each label."""

    file: PairFile

    def __getitem__(self, sample: int) -> SampleFields:
        fields = super().__getitem__(sample)
        here = self.order[self.starts[sample] : self.starts[sample + 1]] + self.file.first
        responses = np.append(here, -1)[fields["document_ids"]]
        fields["responses"] = np.where(fields["loss_mask"] > 0, responses, -1)
        return fields


def open_pairs(data: DataConfig, seed: int, tokenizer: Tokenizer, template: ChatTemplate | None) -> dict[str, PairFile]:
    """Return the files of pairs by path, with their responses numbered one after another."""
    cache, found, first = IndexCache(data.data_cache_path), dict[str, PairFile](), 0
    specs = read_dataset_specs(data)
    for path in sorted({path for spec in specs if spec is not None for path in spec.prefixes}):
        found[path] = file = PairFile(path, tokenizer, template, data.seq_length, seed, cache)
        file.first, first = first, first + len(file)
    return found


def build_pair_datasets(
    data: DataConfig, samples: Samples, seed: int, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Datasets[SampleFields]:
    """Return the datasets of a run on pairs. Raises ConfigurationError or DataError."""
    files = open_pairs(data, seed, tokenizer, template)
    cache = IndexCache(data.data_cache_path)
    datasets = build_datasets(data, samples, lambda path: Source(len(files[path].pairs), files[path].dataset), cache)
    return datasets._replace(notes=(*(note for file in files.values() for note in file.notes()), *datasets.notes))
