"""Micro-batches for one data-parallel rank, read ahead by threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import NotRequired

import numpy as np

from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.routing_records import RoutingRecords
from megalite.data.sampler import Deal
from megalite.data.sources import Sources
from megalite.data.verification import Verification
from megalite.errors import DataError


class MicroBatchArrays(SampleFields):
    """Fields of the samples of a micro-batch, each [micro_batch_size, sequence_length].

    Attributes:
        sample_ids: global number of each sample: its position in the order in which the run consumes samples.
        replayed: [micro_batch_size, sequence_length, layers with experts, topk], the recorded choices of experts; None
            if none are replayed.
        sources: int64 [micro_batch_size], the source of each sample, if sources are told.
        text_bytes: int64, bytes of the text of each label, if somebody asks and the tokenizer tells them.
    """

    sample_ids: Sequence[int]
    replayed: np.ndarray | None
    sources: NotRequired[np.ndarray | None]
    text_bytes: NotRequired[np.ndarray | None]


@dataclass(eq=False)
class MicroBatchLoader:
    """Loader of one rank's micro-batches; the choice of samples is a pure function of the number of consumed samples.

    This is a context manager: threads start at the first use and end at its exit.

    Attributes:
        dataset: samples by global number.
        micro_batch_size: samples in a micro-batch.
        vocab_size: tokens must be below it; data without a record of its tokenizer may have larger ones.
        num_workers: threads that read the next step's micro-batches during this step; 0: read when requested.
        verification: check of the data files; if it finds damage, the run ends at the next step. None: no check.
        routing: records of routing to replay; None: none.
        sources: sources of the samples; None: none is told.
        byte_lengths: bytes of the text of each token, int64 [vocab_size]; None: nobody asks.
        fills: after the last sample of the dataset come empty ones, whose tokens are all padding.
    """

    dataset: Dataset[SampleFields]
    _: KW_ONLY
    micro_batch_size: int
    vocab_size: int
    num_workers: int = 0
    verification: Verification | None = None
    routing: RoutingRecords | None = None
    sources: Sources | None = None
    byte_lengths: np.ndarray | None = None
    fills: bool = False

    def __post_init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: dict[Sequence[int], Future[MicroBatchArrays]] = {}

    def micro_batches(self, consumed_samples: int, deal: Deal) -> list[MicroBatchArrays]:
        """Return this rank's micro-batches of the step that starts at global sample `consumed_samples`.

        An empty slot has the tokens of the rank's last micro-batch, or if it has none, of the step's first one, all of
        them padding that counts nowhere.

        Raises:
            DataError: a file is damaged, the dataset has too few samples, or a token is outside the vocabulary.
        """
        if self.verification is not None:
            self.verification.raise_damage()
        wanted = deal.samples(consumed_samples, self.micro_batch_size, self.dataset)
        if self.num_workers == 0:
            read = [self._load(samples) for samples in wanted]
        else:
            ready = self._submit(wanted)
            # Read ahead before waiting. Micro-batches that were read ahead for another step are dropped.
            next_step = consumed_samples + deal.total * self.micro_batch_size
            self._ahead = self._submit(deal.samples(next_step, self.micro_batch_size, self.dataset))
            read = [ready[samples].result() for samples in wanted]
        if not deal.empty:
            return read
        some = read[-1] if read else self._load(range(consumed_samples, consumed_samples + self.micro_batch_size))
        return read + [emptied(some)] * deal.empty

    def _submit(self, wanted: Sequence[Sequence[int]]) -> dict[Sequence[int], Future[MicroBatchArrays]]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.num_workers, thread_name_prefix="loader")
        return {samples: self._ahead.get(samples) or self._executor.submit(self._load, samples) for samples in wanted}

    def _load(self, samples: Sequence[int]) -> MicroBatchArrays:
        """Read samples into arrays [samples, sequence], or None where no sample has such an array.

        Raises:
            DataError: the dataset ends before, or a token is not of the vocabulary.
        """
        if samples[-1] >= len(self.dataset) and not self.fills:
            raise DataError(
                f"the run reads samples {samples[0]} to {samples[-1]}, but the dataset is for a shorter run: "
                f"it has {len(self.dataset)}: give --train-iters or --train-samples as at its start"
            )
        rows = [self._row(sample) for sample in samples]
        tokens, labels = np.stack([row["tokens"] for row in rows]), np.stack([row["labels"] for row in rows])
        # Viewed as unsigned numbers, negative tokens are large: one comparison finds both errors.
        if max(tokens.view(np.uint64).max(), labels.view(np.uint64).max()) >= self.vocab_size:
            least, most = min(tokens.min(), labels.min()), max(tokens.max(), labels.max())
            raise DataError(
                f"samples {samples[0]} to {samples[-1]} have tokens from {least} to {most}, but the "
                f"tokenizer's vocabulary is {self.vocab_size}: the data was made with another tokenizer"
            )
        documents = [row["document_ids"] for row in rows if row["document_ids"] is not None]
        padded = [row["padding"] for row in rows]
        whole = np.zeros(tokens.shape[1], bool)
        sources = None
        if self.sources is not None:
            sources = np.array([self.sources.of(min(sample, len(self.dataset) - 1)) for sample in samples], np.int64)
        arrays = MicroBatchArrays(
            tokens=tokens,
            labels=labels,
            loss_mask=np.stack([row["loss_mask"] for row in rows]),
            positions=np.stack([row["positions"] for row in rows]),
            document_ids=np.stack(documents) if documents else None,
            padding=None
            if all(each is None for each in padded)
            else np.stack([whole if each is None else each for each in padded]),
            sample_ids=samples,
            replayed=None
            if self.routing is None
            else np.stack([self.routing.read(sample, tokens.shape[1]) for sample in samples]),
            sources=sources,
            text_bytes=None if self.byte_lengths is None else self.byte_lengths[labels],
        )
        if "responses" in rows[0]:
            arrays["responses"] = np.stack([row["responses"] for row in rows])
        return arrays

    def _row(self, sample: int) -> SampleFields:
        """Return a sample, or, behind the end of the dataset, the last one as padding."""
        if sample < len(self.dataset):
            return self.dataset[sample]
        row = self.dataset[len(self.dataset) - 1]
        nothing, everything = np.zeros_like(row["loss_mask"]), np.ones(row["tokens"].shape, bool)
        return SampleFields(**{**row, "loss_mask": nothing, "padding": everything})

    def close(self) -> None:
        """End the threads and drop the micro-batches that were read ahead."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor, self._ahead = None, {}

    def __enter__(self) -> MicroBatchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def emptied(fields: MicroBatchArrays) -> MicroBatchArrays:
    """Return a micro-batch whose tokens are all padding."""
    nothing, everything = np.zeros_like(fields["loss_mask"]), np.ones(fields["tokens"].shape, bool)
    return MicroBatchArrays(**{**fields, "loss_mask": nothing, "padding": everything, "replayed": None})
