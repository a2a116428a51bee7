"""Split of a network over the stages of pipeline ranks of unequal speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import inf
from statistics import mean

from megalite.pipeline.stages import Stages


@dataclass(frozen=True)
class PartCosts:
    """Costs of the parts of a network with a micro-batch, forward and backward, in any unit."""

    embedding: float
    layers: tuple[float, ...]
    head: float

    def __mul__(self, factor: float) -> PartCosts:
        return PartCosts(self.embedding * factor, tuple(cost * factor for cost in self.layers), self.head * factor)

    @staticmethod
    def highest(costs: Sequence[PartCosts]) -> PartCosts:
        """Return the highest cost of each part."""
        layers = tuple(max(each) for each in zip(*(one.layers for one in costs), strict=True))
        return PartCosts(max(one.embedding for one in costs), layers, max(one.head for one in costs))


def letters(layers: Sequence[int]) -> str:
    """Return the contents of stages with these numbers of layers, as letters of --pipeline-model-parallel-layout."""
    texts = ["t" * count for count in layers]
    texts[0], texts[-1] = f"E{texts[0]}", f"{texts[-1]}L"
    if len(texts) == 1:
        return _short(f"E{'t' * layers[0]}L")
    *first, last = texts
    alike = ((_short(f"{stage}|"), len(list(group))) for stage, group in groupby(first))
    return "".join(stage if count == 1 else f"({stage})*{count}" for stage, count in alike) + _short(last)


def _short(text: str) -> str:
    count = text.count("t")
    return text if count < 2 else text.replace("t" * count, f"t*{count}")


def stage_costs(costs: Sequence[PartCosts], stages: Stages, layers: Sequence[int]) -> list[float]:
    """Return the cost of each stage with these numbers of layers. `costs`: those of the parts on each rank."""
    found = []
    for stage, (end, count) in enumerate(zip(accumulate(layers), layers, strict=True)):
        own = costs[stages.place(stage)[0]]
        ends = own.embedding * (stage == 0) + own.head * (stage == stages.count - 1)
        found.append(ends + sum(own.layers[end - count : end]))
    return found


def rank_costs(costs: Sequence[PartCosts], stages: Stages, layers: Sequence[int]) -> list[float]:
    """Return the cost of all stages of each rank."""
    of_stages = stage_costs(costs, stages, layers)
    return [sum(of_stages[stage] for stage in stages.of_rank(rank)) for rank in range(stages.ranks)]


def split(costs: Sequence[PartCosts], stages: Stages) -> list[int]:
    """Return the numbers of layers of the stages with which the slowest rank is as fast as possible.

    Only the first and the last stage may have no layer. With one stage per rank, or with layers that are all alike, no
    other split is faster; otherwise the better one of two good splits is taken. Equal costs give the same split
    everywhere.

    Args:
        costs: those of the parts on each rank; there are at least as many parts as stages.
    """
    found = [_by_stages(costs, stages)]
    if stages.chunks > 1:
        found.append(_by_ranks(costs, stages))

    def slowest(layers: Sequence[int]) -> tuple[float, float]:
        return max(rank_costs(costs, stages, layers)), max(stage_costs(costs, stages, layers))

    return min(found, key=slowest)


def _by_stages(costs: Sequence[PartCosts], stages: Stages) -> list[int]:
    """Return the split whose slowest stage is as fast as possible, by dynamic programming over stages and parts."""
    sums = [list(accumulate([each.embedding, *each.layers, each.head], initial=0.0)) for each in costs]
    parts = len(sums[0]) - 1
    best = [0.0] + [inf] * parts  # the slowest of the stages so far, by the number of parts that they have
    cuts: list[list[int]] = []
    for stage in range(stages.count):
        own = sums[stages.place(stage)[0]]
        longer, cut_of = [inf] * (parts + 1), [0] * (parts + 1)
        for end in range(stage + 1, parts + 1):
            for cut in range(end - 1, stage - 1, -1):
                cost = own[end] - own[cut]
                if cost >= longer[end]:  # an earlier cut costs this stage even more
                    break
                if (slowest := max(best[cut], cost)) < longer[end]:
                    longer[end], cut_of[end] = slowest, cut
        best = longer
        cuts.append(cut_of)
    ends = [parts]
    for cut_of in reversed(cuts):
        ends.append(cut_of[ends[-1]])
    counts = [end - begin for begin, end in zip(ends[:0:-1], ends[-2::-1], strict=True)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _by_ranks(costs: Sequence[PartCosts], stages: Stages) -> list[int]:
    """Return the split whose slowest rank is as fast as possible if all layers are alike: each layer in turn goes to
    the rank that is done first with it, and there to the stage that is."""
    last = stages.count - 1
    counts = [int(0 < stage < last) for stage in range(stages.count)]
    alike = [PartCosts(each.embedding, (mean(each.layers),) * len(each.layers), each.head) for each in costs]
    of_stages, of_ranks = stage_costs(alike, stages, counts), rank_costs(alike, stages, counts)
    for _ in range(len(costs[0].layers) - sum(counts)):
        rank = min(range(stages.ranks), key=lambda rank: of_ranks[rank] + alike[rank].layers[0])
        stage = min(stages.of_rank(rank), key=of_stages.__getitem__)
        counts[stage] += 1
        of_ranks[rank] += alike[rank].layers[0]
        of_stages[stage] += alike[rank].layers[0]
    return counts
