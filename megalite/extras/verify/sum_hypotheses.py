"""Explanations by sums: over ranks, micro-batches, tokens or uses, of which each rank has only its own terms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megalite.extras.verify.cuts import tokens_of
from megalite.extras.verify.judgement import Judgement
from megalite.extras.verify.own_terms import balance_parts
from megalite.extras.verify.recall import SHARED
from megalite.extras.verify.suspect import Expected, Hypothesis, Suspect
from megalite.model.gpt import GPT

_MOST_REPLICAS = 16
"""Maximum number of data-parallel ranks of which each is a hypothesis."""
_OF_EXPERTS = re.compile(r"\.moe\.(gate_up|up|down)")
"""Logical names of experts' weights."""


def sums(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield which sum may be missing."""
    if suspect.first.entry.role == "parameter":
        return
    found = _of_weights(suspect) if suspect.first.point is None else _of_points(suspect)
    for text, expected in found:
        yield Hypothesis("sum", text, suspect.ratio(expected))


_Found = Iterator[tuple[str, Expected]]


def _of_points(suspect: Suspect) -> _Found:
    """Yield the sums that give the input or output of a module, or its gradient."""
    recall, first, ranks = suspect.recall, suspect.first, suspect.size("tp")
    assert first.point is not None
    if ranks > 1:
        terms = [recall.partial(first, (rank, ranks)) for rank in range(ranks)]
        if all(term is not None for term in terms):

            def own(each: Judgement) -> Tensor:
                term = terms[suspect.place(each, "tp")[0]]
                return recall.expected(each, change=lambda _: term)  # type: ignore[return-value,arg-type]

            yield "the sum over axis tp is missing: each rank has its own term", own
    if not first.point.role.endswith("gradient"):
        return
    for axis, key, what in (
        ("tp", "tp", "is missing: each rank has the gradient of its own heads or features"),
        ("cp", "cp", "is missing: each rank has the gradient of its own queries"),
        ("tp", SHARED, "is missing for shared keys and values: each rank has the gradient of its own heads"),
    ):
        if suspect.size(axis) > 1 and (key != SHARED or suspect.size(axis) > suspect.replay.model.kv_groups):
            yield f"the sum over axis {axis} {what}", partial(_own_points, suspect, axis, key)


def _own_points(suspect: Suspect, axis: str, key: str, judgement: Judgement) -> Tensor | None:
    values = suspect.recall.own_points(judgement, key, suspect.place(judgement, axis))
    assert judgement.point is not None
    if judgement.point not in values:
        return None
    return suspect.recall.expected(judgement, change=lambda _: values[judgement.point])  # type: ignore[index]


def _of_weights(suspect: Suspect) -> _Found:
    """Yield the sums that give the gradient of a weight."""
    recall, first = suspect.recall, suspect.first
    logical = recall.logical(first)
    replicas, per_rank = int(suspect.sizes.get("dp", 1)), int(suspect.sizes.get("micro-batches", 1))
    parts: list[tuple[str, Callable[[Judgement, int], bool]]] = []
    if replicas > 1:
        parts.append(
            ("the sum over axis dp is missing", lambda each, at: at // per_rank == suspect.place(each, "dp")[0])
        )
        groups = suspect.size("ep")
        if _OF_EXPERTS.search(logical) and 1 < groups < replicas:
            parts.append(
                (
                    "the sum over axis edp is missing: each rank has the gradient of the tokens of its own group",
                    lambda each, at: at // per_rank // groups == suspect.place(each, "dp")[0] // groups,
                )
            )
        if per_rank > 1:
            before: Callable[[Judgement, int], bool] = lambda each, at: (  # noqa: E731
                at % per_rank < per_rank - 1 or at // per_rank == suspect.place(each, "dp")[0]
            )
            parts.append(("the last micro-batch of other ranks is missing: it is added after the sum", before))
    if per_rank > 1:
        doubled = partial(recall.gradient, weight_of=lambda at: 2.0 ** (per_rank - 1 - at % per_rank))
        yield "each micro-batch doubles what earlier micro-batches have added", doubled
        parts += [
            ("only the last micro-batch counts", lambda each, at: at % per_rank == per_rank - 1),
            ("only the first micro-batch counts", lambda each, at: at % per_rank == 0),
            ("the last micro-batch is missing", lambda each, at: at % per_rank != per_rank - 1),
            ("the first micro-batch is missing", lambda each, at: at % per_rank != 0),
        ]
    undivided = [(float(replicas), f", and nothing is divided by {replicas}")] if replicas > 1 else []
    for text, keeps in parts:
        for scale, how in ((1.0, ""), *undivided):
            yield text + how, partial(_of_micro_batches, suspect, keeps, scale)
    for axis, words in (("tp", "sequence-parallel ranks (axis tp)"), ("cp", "axis cp")):
        if suspect.size(axis) > 1:
            yield (
                f"the sum over {words} is missing: each has that of its tokens",
                partial(_of_tokens, suspect, axis),
            )
    if suspect.size("tp") > 1:
        yield (
            "the sum over axis tp is missing: each rank has that of its heads or features",
            partial(_own_gradient, suspect),
        )
    uses = recall.places_of(logical)
    if len(uses) == 2:
        if suspect.size("pp") > 1:
            yield (
                "the sum over the first and the last stage is missing: each has that of its own use of the embedding",
                lambda each: recall.gradient(each, _whole, uses=[int(suspect.place(each, "pp")[0] > 0)]),
            )
        for replica in range(min(replicas, _MOST_REPLICAS) if replicas > 1 else 0):
            yield (
                f"of the tied weight, the other stage's use counts for data-parallel rank {replica} alone: it is added "
                "after the sum over ranks",
                partial(_of_other_stage, suspect, replica),
            )
        for use, what in enumerate(("the embedding", "the output layer")):
            only = partial(recall.gradient, weight_of=_whole, uses=[use])
            yield f"of the tied weight, only its use in {what} counts", only


def _whole(number: int) -> float:
    return 1.0


def _of_micro_batches(
    suspect: Suspect, keeps: Callable[[Judgement, int], bool], scale: float, judgement: Judgement
) -> Tensor:
    return suspect.recall.gradient(judgement, lambda number: scale if keeps(judgement, number) else 0.0)


def _of_other_stage(suspect: Suspect, replica: int, judgement: Judgement) -> Tensor:
    """Return the gradient of a tied weight's own use, and of the other use for the samples of one replica."""
    own, per_rank = int(suspect.place(judgement, "pp")[0] > 0), int(suspect.sizes.get("micro-batches", 1))
    other = suspect.recall.gradient(judgement, lambda at: float(at // per_rank == replica), uses=[1 - own])
    return suspect.recall.gradient(judgement, _whole, uses=[own]) + other


def _of_tokens(suspect: Suspect, axis: str, judgement: Judgement) -> Tensor:
    return suspect.recall.gradient(judgement, _whole, tokens=(axis, *suspect.place(judgement, axis)))


def _own_gradient(suspect: Suspect, judgement: Judgement) -> Tensor:
    return suspect.recall.gradient(judgement, _whole, own=("tp", *suspect.place(judgement, "tp")))


def terms(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield that a term of the loss beside the main one is weighted otherwise, or taken over each rank's own tokens."""
    first, replay = suspect.first, suspect.replay
    if first.entry.role == "parameter" or (first.point is not None and not first.point.role.endswith("gradient")):
        return
    names = [term.name for term in replay.terms if term.weight and term.name != "lm_loss"]
    for name in names:
        times = _linear(suspect, name)
        for factor, why in _weights(suspect):
            said = "is left out" if factor == 0.0 else f"is {factor:.6g} times what it should be ({why})"
            yield Hypothesis("term", f"the term {name} of the loss {said}", suspect.ratio(times(factor)))
        for axis in ("tp", "cp"):
            if (count := suspect.size(axis)) == 1:
                continue
            times, local = _linear(suspect, name, _parts(suspect, axis, count)), "from the counts of its own tokens"
            for factor, why in ((1.0, ""), *_weights(suspect)):
                said = f"{local}, times {factor:.6g} ({why})" if why else local
                yield Hypothesis(
                    "term", f"each rank of axis {axis} computes the term {name} {said}", suspect.ratio(times(factor))
                )


_Linear = Callable[[float], Expected]
"""Function from the factor of a term of the loss to what a rank would have recorded."""


def _linear(suspect: Suspect, name: str, change: Callable[[GPT], None] | None = None) -> _Linear:
    """Return what would have been recorded with a factor of a term of the loss, whose gradients are linear in it."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def gradient(judgement: Judgement, factor: float, change: Callable[[GPT], None] | None) -> Tensor:
        if judgement.point is None:
            return suspect.recall.gradient(judgement, _whole, factors={name: factor}, change=change)
        values = suspect.recall.changed_points(judgement, {name: factor}, change)
        return suspect.recall.expected(judgement, change=lambda _: values[judgement.point])  # type: ignore[index]

    def expected(judgement: Judgement, factor: float) -> Tensor:
        if id(judgement) not in known:
            without = gradient(judgement, 0.0, None)
            known[id(judgement)] = without, gradient(judgement, 1.0, change) - without
        without, whole = known[id(judgement)]
        return without + factor * whole

    return lambda factor: partial(expected, factor=factor)


def _parts(suspect: Suspect, axis: str, count: int) -> Callable[[GPT], None]:
    """Return a change by which each rank of an axis balances the loads of its own tokens."""
    length = suspect.replay.batches[0]["tokens"].shape[1]
    if axis == "cp":
        return partial(balance_parts, parts=[tokens_of((at, count), length) for at in range(count)])
    return partial(balance_parts, parts=torch.arange(length).chunk(count))


def _weights(suspect: Suspect) -> list[tuple[float, str]]:
    """Return factors that a term of the loss may have by mistake."""
    sizes = {name: size for name, size in suspect.sizes.items() if size > 1 and name not in ("tokens", "features")}
    replicas, micro_batches = suspect.sizes.get("dp", 1.0), suspect.sizes.get("micro-batches", 1.0)
    sizes["micro-batches of the step"] = replicas * micro_batches
    found: dict[float, str] = {0.0: ""}
    for name, size in sizes.items():
        found.setdefault(size, f"the number of {name}")
        found.setdefault(1.0 / size, f"1 / the number of {name}")
    found.setdefault(2.0, "twice")
    found.setdefault(0.5, "half")
    found.pop(1.0, None)
    return list(found.items())
