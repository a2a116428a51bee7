"""Conversations packed into sequences: tokens attend within their conversation only, and only answers have a loss.

A conversation of n tokens takes n - 1 places. Each place is an input and its label, so no label belongs to another
conversation. In each epoch the conversations are shuffled and added to sequences in this order. A conversation that
does not fit into the rest of a sequence begins the next sequence. A conversation that is longer than a sequence is cut.

The text of a conversation is tokenized at once, as it is at inference. Tokenizing its parts separately would give other
tokens with many tokenizers. A token with at least one character of an answer counts in the loss. If other roles have
weights, too, a token with characters of several messages is of an answer, or else of the role that is named first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.data import DataConfig
from megalite.data.chat import ANSWERS, ChatTemplate, Span, conversation_reader
from megalite.data.datasets import Datasets, Samples, Source, build_datasets
from megalite.data.documents import check_text, parse_record
from megalite.data.fields import SampleFields
from megalite.data.index_cache import Arrays, IndexCache
from megalite.data.indexed_dataset import token_dtype
from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.interface import beginning_of_documents, begun
from megalite.errors import ConfigurationError, DataError
from megalite.small_files import open_regular, reason


def build_sft_datasets(
    data: DataConfig,
    samples: Samples,
    seed: int,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    roles: Sequence[str] = (ANSWERS,),
) -> Datasets[SampleFields]:
    """Return the datasets of a run on conversations; `data` names JSONL files.

    `roles`: those whose messages may have a weight in the loss, the answers' first.

    Raises:
        ConfigurationError: there is no training data, or no message is of one of the roles.
        DataError: a file is missing, a line is not a conversation, or no conversation has an answer.
    """
    notes, cache, seen = [], IndexCache(data.data_cache_path), set[int]()

    def open_source(path: str) -> Source[SampleFields]:
        file = ConversationFile(path, tokenizer, template, data.seq_length, seed, cache, roles)
        notes.extend(file.notes())
        seen.update(file.roles.tolist())
        return Source(len(file), file.dataset)

    datasets = build_datasets(data, samples, open_source, cache)
    for number, role in enumerate(roles[1:], start=2):
        if number not in seen:
            raise ConfigurationError(f"--loss-weights has a weight for {role!r}, and no message is of this role")
    return datasets._replace(notes=(*notes, *datasets.notes))


class ConversationFile:
    """JSONL file of conversations, tokenized once and cached together with the sample indices.

    Args:
        path: the file.
        tokenizer: tokenizer for the text.
        template: the chat template; None: the plain form of `megalite.data.chat`.
        sequence_length: number of input tokens in a sample.
        seed: seed of the samples' order.
        cache: cache for the tokens and the indices.
        roles: those whose messages may have a weight in the loss, the answers' first.

    Attributes:
        tokens: tokens of all conversations, concatenated.
        answers: begin and end of each answer in `tokens`, alternating; also of each message of the other roles.
        roles: int8, the role of each of them, from 1 on.
        has_roles: samples tell the roles of their labels.
        begins, ends: begin and end of each conversation in `tokens`.
        kind: name of what the lines have, for the cache.
        of_line: number of conversations in a line.
        places: number of places that each conversation takes in a sequence.
        answered: bool, whether a conversation has a label in an answer.
        unanswered: number of those that have none.

    Raises:
        DataError: the file cannot be read, a line is not a conversation, or no conversation has an answer.
    """

    kind, of_line = "conversations", 1

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        sequence_length: int,
        seed: int,
        cache: IndexCache,
        roles: Sequence[str] = (ANSWERS,),
    ) -> None:
        self.has_roles = len(roles) > 1
        self.path, self.sequence_length, self.seed, self.cache = path, sequence_length, seed, cache
        self.eod = tokenizer.eod
        self.description = {
            "kind": self.kind,
            "version": 3,
            "file_sha256": _sha256(path),
            "tokenizer": tokenizer.identity(),
            "template": None if template is None else list(astuple(template)),
        }
        if self.has_roles:
            self.description["roles"] = list(roles)
        arrays = cache.get(
            path, self.description, lambda: _read_conversations(path, tokenizer, template, roles, self.conversations)
        )
        self.tokens, self.answers, self.ends = arrays["tokens"], arrays["answers"], arrays["ends"]
        self.roles = arrays["roles"] if self.has_roles else np.ones(len(self.answers) // 2, np.int8)
        self.begins = np.concatenate([[0], self.ends[:-1]])
        self.places = np.minimum(self.ends - self.begins - 1, sequence_length)
        first_labels = self.begins + 1
        answer_begins, answer_ends = np.append(self.answers[::2], self.ends[-1]), self.answers[1::2]
        next_answers = answer_begins[np.searchsorted(answer_ends, first_labels, side="right")]
        self.answered = next_answers < first_labels + self.places
        self.unanswered = int(np.count_nonzero(~self.answered))
        if self.unanswered == len(self):
            raise DataError(
                f"in {path} no answer begins within --seq-length {sequence_length}, so nothing would be learned: "
                "increase it"
            )

    @staticmethod
    def conversations(record: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Return the conversations of a line, always as many. Raises ValueError if it does not have them."""
        return (record,)

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self.ends)

    def roles_of(self, begin: int, end: int) -> np.ndarray:
        """Return the roles of the tokens from `begin` to `end`, int8: 1 if a token belongs to an answer, 0 for none."""
        answers, is_inside = np.divmod(np.searchsorted(self.answers, np.arange(begin, end), side="right"), 2)
        return np.append(self.roles, np.int8(0))[answers] * is_inside.astype(np.int8)

    def notes(self) -> list[str]:
        """Return messages for the user about the file."""
        cut = np.count_nonzero(self.ends - self.begins - 1 > self.sequence_length)
        of = f"of {len(self)} conversations"
        notes = []
        if cut:
            notes.append(f"{self.path}: {cut} {of} are longer than --seq-length and are cut")
        if self.unanswered:
            answers = f"{self.unanswered} {of} have no answer within --seq-length"
            notes.append(f"{self.path}: {answers}: nothing is learned from them")
        return notes

    def dataset(self, sequences: range, num_samples: int | None) -> SFTDataset:
        """Return a dataset of at least `num_samples` samples of these conversations; None: the samples of one epoch."""
        description = self.description | {
            "kind": "packed conversations",
            "conversations": [sequences.start, sequences.stop],
            "num_samples": num_samples,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
        }

        def build() -> Arrays:
            places = self.places[sequences.start : sequences.stop]
            order, starts = pack(places, self.sequence_length, num_samples, self.seed)
            return {"order": order + sequences.start, "starts": starts}

        arrays = self.cache.get(self.path, description, build)
        return SFTDataset(self, arrays["order"], arrays["starts"])


def pack(lengths: np.ndarray, capacity: int, num_samples: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign conversations to sequences.

    Args:
        lengths: places that each conversation takes, from 1 to `capacity`.
        capacity: places in a sequence.
        num_samples: number of sequences needed; None: the sequences of one epoch.
        seed: seed of the order.

    Returns:
        order: conversation numbers, int64; complete epochs, one after another.
        starts: sequence k consists of `order[starts[k]:starts[k + 1]]`, int64.
    """
    random = np.random.RandomState(seed)
    epochs, starts = list[np.ndarray](), [0]
    while len(starts) == 1 or (num_samples is not None and len(starts) <= num_samples):
        order = random.permutation(len(lengths))
        ends = np.cumsum(lengths[order])
        first, at = len(epochs) * len(lengths), 0
        while at < len(order):
            filled = ends[at] - lengths[order[at]]
            at = int(np.searchsorted(ends, filled + capacity, side="right"))
            starts.append(first + at)
        epochs.append(order)
    return np.concatenate(epochs).astype(np.int64), np.array(starts, np.int64)


@dataclass(frozen=True)
class SFTDataset:
    """Sequences of packed conversations, see `pack`."""

    file: ConversationFile
    order: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, sample: int) -> SampleFields:
        """Return a sequence. The unfilled places at its end are one more document, without loss.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        file, length = self.file, self.file.sequence_length
        tokens, labels = np.full((2, length), file.eod, np.int64)
        roles = np.zeros(length, np.int8)
        positions, documents = np.arange(length, dtype=np.int64), np.zeros(length, np.int64)
        at = 0
        for conversation in self.order[self.starts[sample] : self.starts[sample + 1]]:
            begin, count = int(file.begins[conversation]), int(file.places[conversation])
            here = slice(at, at + count)
            tokens[here] = file.tokens[begin : begin + count]
            labels[here] = file.tokens[begin + 1 : begin + count + 1]
            roles[here] = file.roles_of(begin + 1, begin + count + 1)
            at += count
            positions[at:] = np.arange(length - at)
            documents[at:] += 1
        fields = SampleFields(
            tokens=tokens,
            labels=labels,
            loss_mask=(roles == 1).astype(np.float32),
            positions=positions,
            document_ids=documents,
            padding=np.arange(length) >= at if at < length else None,
        )
        if file.has_roles:
            fields["roles"] = roles
        return fields


def _sha256(path: str) -> str:
    try:
        with open_regular(Path(path)) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        expected = "with --sft the data are JSONL files of conversations, with --preference-data of pairs"
        raise DataError(f"{path} cannot be read ({reason(error)}): {expected}") from error


def _read_conversations(
    path: str,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    weighted: Sequence[str] = (ANSWERS,),
    conversations: Callable[[dict[str, Any]], Sequence[dict[str, Any]]] = ConversationFile.conversations,
) -> Arrays:
    """Return the arrays "tokens", "answers", "roles" and "ends"; see the attributes of `ConversationFile`."""
    dtype = token_dtype(tokenizer.vocab_size)
    tokens, answers, ends, roles, of_answers = bytearray(), array("q"), array("q"), set[str](), bytearray()
    beginning = cache(partial(beginning_of_documents, tokenizer))
    with conversation_reader(template, weighted) as spans_of, Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                for record in conversations(parse_record(line)):
                    # A template itself writes what begins a conversation.
                    is_begun = template is not None and record.get("messages") is not None
                    ids, learned = _encoded(spans_of(record), tokenizer, weighted, () if is_begun else beginning())
                    if len(ids) < 2:
                        raise ValueError("it has no text")
                    if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
                        raise ValueError(
                            f"it has tokens from {min(ids)} to {max(ids)}, but the tokenizer says that it has "
                            f"{tokenizer.vocab_size}: its file is damaged"
                        )
                    roles.update(message["role"] for message in record.get("messages") or ())
                    begin = ends[-1] if ends else 0
                    padded = np.concatenate([[0], learned, [0]])
                    borders = np.flatnonzero(padded[1:] != padded[:-1])  # of which one can be an end and a beginning
                    begins, stops = borders[padded[borders + 1] > 0], borders[padded[borders] > 0]
                    answers.frombytes((begin + np.stack([begins, stops], axis=1)).astype(np.int64).tobytes())
                    of_answers += learned[begins].tobytes()
                    tokens += np.asarray(ids, dtype).tobytes()
                    ends.append(begin + len(ids))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} line {number} is not a conversation: {error}") from error
    if not ends:
        raise DataError(f"{path} has no conversations: with --sft the data are JSONL files of them")
    if not answers:
        raise DataError(
            f"{path} has no answers, so nothing would be learned: answers are what the role {ANSWERS!r} says, and "
            f"the roles there are {', '.join(map(repr, sorted(roles)))}: rename the one that answers"
        )
    return {
        "tokens": np.frombuffer(tokens, dtype),
        "answers": np.frombuffer(answers, np.int64),
        "ends": np.frombuffer(ends, np.int64),
        "roles": np.frombuffer(of_answers, np.int8),
    }


def _encoded(
    spans: Sequence[Span], tokenizer: Tokenizer, roles: Sequence[str], beginning: Sequence[int] = ()
) -> tuple[list[int], np.ndarray]:
    """Return the tokens of a conversation, and the number of the role of each, int8, from 1 on; 0 for none.

    `beginning`: tokens to put first, unless the text begins with them.
    """
    numbers = {role: number for number, role in enumerate(roles, start=1)} | {"": 0}
    ids, learned = list[int](), list[np.ndarray]()
    for stretch in _stretches(spans):
        text = "".join(span.text for span in stretch)
        check_text(text)
        found, offsets = tokenizer.encode_with_offsets(text)
        of_text = np.repeat([numbers[span.role] for span in stretch], [len(span.text) for span in stretch])
        ids += found
        learned.append(np.zeros(len(found), np.int8))
        for number in sorted({*of_text.tolist()} - {0}, reverse=True):
            before = np.concatenate([[0], np.cumsum(of_text == number)])  # for each character, those of the role before
            learned[-1][before[offsets[:, 1]] > before[offsets[:, 0]]] = number
        if stretch[-1].ends:
            ids.append(tokenizer.eod)
            learned.append(np.array([numbers[stretch[-1].role]], np.int8))
    whole = begun(ids, list(beginning))
    return whole, np.concatenate([np.zeros(len(whole) - len(ids), np.int8), *learned])


def _stretches(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """Yield the spans in groups, each up to an end of document; the last group has the remaining spans."""
    begin = 0
    for end, span in enumerate(spans, 1):
        if span.ends or end == len(spans):
            yield spans[begin:end]
            begin = end
