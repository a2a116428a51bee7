"""Gradients of a step that several replicas compute: digests of what each rank adds up, and the verdict on them.

A pass computes the gradients of one step on all ranks. In a pass with a shift, each replica takes the micro-batches of
the replica that is so many places after it. Gradients are compared where they leave a rank: its sums before the
reduction over ranks. Sums that are not those of the step go nowhere: nothing is sent, and the step overwrites them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megalite.data.sampler import equal_deal
from megalite.extras.corruption.bit_hash import BitHash
from megalite.extras.corruption.replicas import uncounted
from megalite.optim.accumulator import Accumulator
from megalite.optim.flat import owned
from megalite.optim.reduction import Reduction
from megalite.parallel.collectives import Pending, all_gather_json, completed
from megalite.parallel.mesh import ParallelMesh
from megalite.training.gradients import Gradients
from megalite.training.nonfinite_search import not_finite
from megalite.training.trainer import Trainer

Digest = tuple[int, ...]
"""Digests of what the ranks of a replica have computed, in rank order."""


@dataclass(frozen=True)
class Result:
    """Sums that one replica has computed of a step's micro-batches."""

    unit: int
    """The replica that these micro-batches are dealt to."""
    replica: int
    """The replica that has computed them."""
    digest: Digest


@dataclass(frozen=True)
class Judgement:
    """Verdict on the results of several passes."""

    kind: str
    """agrees; transient: a replica was wrong once; sticky: each time, or more than once; undecided: none of these."""
    replicas: tuple[int, ...] = ()
    """The replicas that were wrong, or that may have been."""
    is_certain: bool = True
    """False if one of the replicas is wrong, and it is not known which."""
    right: Mapping[int, Digest] = field(default_factory=dict)
    """Digest of each unit on which two replicas agree."""


def judge(results: Sequence[Result]) -> Judgement:
    """Return the verdict. What two replicas agree on is right."""
    wrong: dict[int, int] = {}
    doubtful: dict[tuple[int, int], set[Digest]] = {}
    right: dict[int, Digest] = {}
    for unit in sorted({result.unit for result in results}):
        own = [result for result in results if result.unit == unit]
        by_digest: dict[Digest, set[int]] = {}
        for result in own:
            by_digest.setdefault(result.digest, set()).add(result.replica)
        agreed = [digest for digest, replicas in by_digest.items() if len(replicas) > 1]
        if len(agreed) != 1:
            for result in own:
                doubtful.setdefault((result.replica, unit), set()).add(result.digest)
            continue
        right[unit] = agreed[0]
        for result in own:
            if result.digest != agreed[0]:
                wrong[result.replica] = wrong.get(result.replica, 0) + 1
    if wrong:
        often = [replica for replica, times in wrong.items() if times > 1]
        return Judgement("sticky" if often else "transient", tuple(sorted(often or wrong)), right=right)
    if doubtful:
        repeated = all(len(digests) == 1 for digests in doubtful.values())
        replicas = tuple(sorted({replica for replica, _ in doubtful}))
        return Judgement("sticky" if repeated else "undecided", replicas, is_certain=False, right=right)
    return Judgement("agrees", right=right)


class Replicas:
    """The replicas of the network: blocks of ranks that have all of its parts, experts included."""

    def __init__(self, mesh: ParallelMesh) -> None:
        block = math.lcm(mesh.size("cp", "tp"), mesh.size("ep", "etp"))
        self.count = mesh.size("dp", "cp", "tp") // block
        self.block = block // mesh.size("cp", "tp")
        """Number of data-parallel ranks of one."""
        ranks = torch.arange(mesh.world_size).view(mesh.size("pp"), self.count, block)
        self.ranks: list[list[int]] = [ranks[:, replica].flatten().tolist() for replica in range(self.count)]


class Reruns:
    """Passes over the micro-batches of a trainer's step. All methods are called by all ranks together."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.replicas = trainer, Replicas(trainer.mesh)
        self._hash = BitHash(trainer.mesh.device)

    def original(self) -> tuple[Gradients, list[Result]]:
        """Compute the gradients of the step that is due, which `Trainer.update` may take."""
        digest = _Digest(self._hash)
        with self._reduced_by(digest, silent=False):
            gradients = self._trainer.forward_backward()
        return gradients, self._gathered(digest, gradients, 0)

    def again(self, shift: int, consumed_samples: int) -> tuple[list[Result], bool]:
        """Compute a step again, each replica the micro-batches of the one `shift` places after it.

        `consumed_samples`: samples before the step.

        Returns:
            The results of all replicas, and whether the gradients of all ranks are finite.
        """
        trainer, digest = self._trainer, _Digest(self._hash, looks=True)
        shares, batch_size = trainer.shares, trainer.task.batch_size.at(consumed_samples)
        rank = (shares.rank + shift * self.replicas.block) % shares.ranks
        number = batch_size // trainer.config.training.micro_batch_size
        deal = replace(equal_deal(rank, shares.ranks, number), left_out=trainer.left_out)
        micro_batches = trainer.loader.micro_batches(consumed_samples, deal)
        with self._reduced_by(digest, silent=True), trainer.unchanged():
            gradients = trainer.forward_backward(micro_batches)
            for accumulator in self._accumulators():
                next(accumulator.completion()).run()  # ends what it has begun
        results = self._gathered(digest, gradients, shift)
        return results, all(all_gather_json(digest.finite, trainer.mesh))

    @contextmanager
    def _reduced_by(self, digest: _Digest, *, silent: bool) -> Iterator[None]:
        accumulators = self._accumulators()
        before = [each.reduction for each in accumulators]
        for accumulator in accumulators:
            accumulator.reduction = _Watched(accumulator.reduction, digest, silent=silent)
        try:
            yield
        finally:
            for accumulator, reduction in zip(accumulators, before, strict=True):
                accumulator.reduction = reduction

    def _accumulators(self) -> list[Accumulator]:
        return [each for bucket in self._trainer.optimizer.buckets for each in bucket.accumulators]

    def _gathered(self, digest: _Digest, gradients: Gradients, shift: int) -> list[Result]:
        for total in gradients.sums.values():
            digest.add(total)
        with uncounted(self._trainer.mesh):
            values: list[int] = all_gather_json(int(digest.value), self._trainer.mesh)
        count = self.replicas.count
        return [
            Result((replica + shift) % count, replica, tuple(values[rank] for rank in self.replicas.ranks[replica]))
            for replica in range(count)
        ]


class _Digest:
    """Digest of the tensors that a rank has computed, in the order in which they are complete."""

    def __init__(self, bit_hash: BitHash, *, looks: bool = False) -> None:
        """Begin one. `looks`: look whether all of them are finite."""
        self._hash, self._looks = bit_hash, looks
        self.value, self.finite = bit_hash.of_all(()), True

    def add(self, values: Tensor) -> None:
        self.value = self._hash.of(torch.stack([self.value, self._hash.of(values)]))
        if self._looks:
            self.finite = self.finite and not_finite(values) is None


class _Watched(Reduction):
    """A reduction whose input is added to a digest first."""

    def __init__(self, inner: Reduction, digest: _Digest, *, silent: bool) -> None:
        """Wrap one. `silent`: send nothing."""
        super().__init__(inner.spec, inner.groups)
        self._inner, self._digest, self._silent = inner, digest, silent

    def begin_step(self, updates: int, loss_scale: float) -> None:
        if not self._silent:
            self._inner.begin_step(updates, loss_scale)

    def begin(self, gradients: Tensor, out: Tensor | None) -> Pending:
        self._digest.add(gradients)
        if not self._silent:
            return self._inner.begin(gradients, out)
        return completed(owned(gradients, self.groups.shards) if out is None else out)
