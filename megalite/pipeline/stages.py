"""Stages of a pipeline: their placement on ranks, and the tensors that each stage passes to the next one."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.parallel.stage import TensorSpec

_HIDDEN_STATES = (TensorSpec("hidden_states"),)


@dataclass(frozen=True)
class Stages:
    """Stages of a model, in order of execution, and their placement on the ranks of a pipeline.

    Each rank has `chunks` stages. Looped (arXiv:2104.04473): chunk c of rank r is stage c * ranks + r. V-shaped
    (arXiv:2405.15362): odd chunks are placed in reverse order of ranks, so with two chunks the first rank has the first
    stage and the last one.
    """

    ranks: int = 1
    chunks: int = 1
    v_shaped: bool = False
    messages: tuple[tuple[TensorSpec, ...], ...] = ()
    """Tensors that each stage except the last passes on, in the order of sending. Empty: each passes hidden states."""

    def __post_init__(self) -> None:
        if self.messages and len(self.messages) != self.count - 1:
            raise ValueError(
                f"{len(self.messages)} borders have messages, but {self.count} stages have {self.count - 1} borders"
            )

    @property
    def count(self) -> int:
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the number of the stage that is this chunk of the rank."""
        goes_back = self.v_shaped and chunk % 2 == 1
        return chunk * self.ranks + (self.ranks - 1 - rank if goes_back else rank)

    def place(self, stage: int) -> tuple[int, int]:
        """Return the rank and the chunk of a stage."""
        chunk, position = divmod(stage, self.ranks)
        goes_back = self.v_shaped and chunk % 2 == 1
        return self.ranks - 1 - position if goes_back else position, chunk

    def passes(self, stage: int) -> tuple[TensorSpec, ...]:
        """Return the tensors that a stage passes to the next one."""
        if stage == self.count - 1:
            return ()
        return self.messages[stage] if self.messages else _HIDDEN_STATES

    def passes_back(self, stage: int) -> tuple[TensorSpec, ...]:
        """Return the tensors whose gradients a stage passes back to the previous one."""
        passed = self.passes(stage - 1) if 0 < stage < self.count else ()
        return tuple(spec for spec in passed if spec.gradient)

    @property
    def ends(self) -> tuple[int, ...]:
        """Ranks of the first and the last stage, in ascending order; a single rank if it has both."""
        return tuple(sorted({self.place(0)[0], self.place(self.count - 1)[0]}))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, by chunk."""
        return tuple(self.stage(rank, chunk) for chunk in range(self.chunks))
