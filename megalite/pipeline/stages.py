"""Which rank holds which stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stages:
    """The stages of a model, in the order in which a micro-batch goes through them, dealt to the ranks of a pipeline.

    Each rank holds `chunks` of them. Looped (arXiv:2104.04473): chunk c of rank r is stage c * ranks + r. V-shaped
    (arXiv:2405.15362): every other round goes back, so that the first rank holds the first stage and the last.
    """

    ranks: int = 1
    chunks: int = 1
    v_shaped: bool = False

    @property
    def count(self) -> int:
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is this chunk of the rank."""
        goes_back = self.v_shaped and chunk % 2 == 1
        return chunk * self.ranks + (self.ranks - 1 - rank if goes_back else rank)

    def place(self, stage: int) -> tuple[int, int]:
        """The (rank, chunk) that holds a stage."""
        chunk, position = divmod(stage, self.ranks)
        goes_back = self.v_shaped and chunk % 2 == 1
        return self.ranks - 1 - position if goes_back else position, chunk

    @property
    def ends(self) -> tuple[int, ...]:
        """The ranks that hold the first stage and the last, in their order; one where it holds both."""
        return tuple(sorted({self.place(0)[0], self.place(self.count - 1)[0]}))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, by chunk."""
        return tuple(self.stage(rank, chunk) for chunk in range(self.chunks))
