"""Loaders that count a rank's micro-batches, for tests that need no shares."""

from __future__ import annotations

from typing import Any

from megalite.data.sampler import equal_deal


class Dealt:
    """Loader of one of `ranks` with equal shares: it takes the number of its micro-batches in place of a deal."""

    def __init__(self, loader: Any, rank: int = 0, ranks: int = 1, replicas: int = 1) -> None:
        self.loader, self._place, self._replicas = loader, (rank, ranks), replicas

    def micro_batches(self, consumed_samples: int, number: int) -> Any:
        rank, ranks = self._place
        return self.loader.micro_batches(consumed_samples, equal_deal(rank, ranks, number * ranks, self._replicas))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __enter__(self) -> Dealt:
        self.loader.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.loader.__exit__(*error)
