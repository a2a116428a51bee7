"""Verification of a recorded step: the command's network, the checkpoint's weights, the trace's tensors."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megalite.checkpoint.compatibility import NOT_THE_FUNCTION
from megalite.config import ModelConfig
from megalite.conversion import megatron_names, torchtitan_names
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import choose
from megalite.conversion.huggingface import forms_of
from megalite.conversion.mapping import FileTensor
from megalite.conversion.megatron import tensors_of_megatron
from megalite.conversion.opened import OpenedModel, logical_tensors
from megalite.conversion.torchtitan_names import torchtitan_tensors
from megalite.data.loader import MicroBatchArrays
from megalite.errors import CheckpointError, DataError
from megalite.extras.verify.batches import StepBatches, from_trace
from megalite.extras.verify.command import Command
from megalite.extras.verify.compare import OF_WEIGHTS, Convention, Walk, first_difference, ranks_of
from megalite.extras.verify.correspondence import Correspondence
from megalite.extras.verify.cuts import tokens_of
from megalite.extras.verify.hypotheses import Search
from megalite.extras.verify.judgement import LIMIT, Judgement
from megalite.extras.verify.recall import Recall
from megalite.extras.verify.replay import Replay
from megalite.extras.verify.rounding import OTHER_CHOICES, TRUTH, emulations
from megalite.extras.verify.suspect import NOT_EXPLAINED, Hypothesis
from megalite.extras.verify.trace import OF_MODULES, Entry, Trace
from megalite.extras.verify.verdict import Figure, Verdict, shown_name
from megalite.model.head import LossConfig
from megalite.parallel.sharding import Box
from megalite.training.builder import model_dtype

_SURE = 3 * LIMIT
"""Ratio from which on an accusation stands. Below it, the tensor is judged again with more orders of summation, since
of three the root mean square may be small by chance."""
_MORE_ORDERS = 12
_MOST_RANKS = 16
"""Maximum number of ranks whose tensors a hypothesis must explain: each costs a computation."""
_RETURNS_BIAS = re.compile(r"(^|\.)(linear_proj|linear_fc1|linear_fc2|self_attention|mlp|shared_experts)$")
"""Names of Megatron-LM's modules that return their bias, which what follows adds."""


def verify(command: Command, opened: OpenedModel, trace: Trace, batches: StepBatches | None = None) -> Verdict:
    """Compare a trace of a step with the truth.

    Args:
        opened: the weights before the step.
        batches: the micro-batches of the step, if the trace does not have them.

    Raises:
        DataError: neither the trace nor `batches` has the samples.
        CheckpointError: the weights cannot be read, or the trace's names are of no program that is known.
    """
    if trace.program == "megalite":
        command = replace(command, program="megalite", per_token_loss=True)
    trace.coordinates = {rank: _coordinates(command, trace, rank) for rank in _ranks(trace)}
    found = from_trace(trace) or batches
    if found is None:
        raise DataError("the trace has no batch, and the command no data: nothing can be computed")
    config = command.config
    model = replace(opened.config, **{name: getattr(config.model, name) for name in NOT_THE_FUNCTION})
    if command.program != "megalite":
        model = replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    elif trace.program == "megalite":  # its modules are those of the pattern, and checkpoints may be of whole layers
        pattern, layers = config.model.hybrid_layer_pattern, config.model.num_layers
        model = replace(model, hybrid_layer_pattern=pattern, num_layers=layers)
    training, dtype = config.training, model_dtype(config)
    names = correspondence(trace, model)

    def walked(more: int) -> Walk:
        """Compare everything. `more`: number of further orders of summation."""
        replay = Replay(
            model,
            opened.source,
            opened.what,
            _weighted(command, names.program, found),
            (TRUTH, *emulations(dtype, command.sizes["tp"], more), *([OTHER_CHOICES] if model.num_experts else [])),
            LossConfig(training.label_smoothing, training.z_loss_coeff),
            training.seed,
            balanced_so_far=found.per_rank if command.balances_so_far else None,
        )
        scale = trace.figures.get("loss_scale")
        walk = Walk(trace, names, replay, found, conventions(command, names.program, found, scale))
        walk.run()
        return walk

    walk, notes = walked(0), [*trace.notes, *found.notes, *command.notes, *opened.notes]
    first = first_difference(walk.judgements)
    if (doubtful := _doubtful(first, figures(walk, command))) is not None:
        notes.append(f"{doubtful} times with few orders of summation: judged again with more")
        walk = walked(_MORE_ORDERS)
        first = first_difference(walk.judgements)
    notes += _notes(walk)
    hypotheses: list[Hypothesis] = []
    if first is not None:
        try:
            hypotheses = explain(walk, first, _sizes(command, found, model))
        except NOT_EXPLAINED as error:
            notes.append(f"no explanation was looked for: {error!r}")
    return Verdict(
        walk.judgements,
        first,
        () if first is None else sorted(set(ranks_of(walk.judgements, first))),
        hypotheses,
        figures(walk, command),
        tuple(_same_samples(found)),
        skipped=walk.skipped,
        notes=notes,
    )


def _doubtful(first: Judgement | None, figures: Sequence[Figure]) -> str | None:
    """Return what is accused, and by how much, if a few more orders of summation may explain it."""
    if first is not None:
        return f"{shown_name(first)} was at {first.ratio:.3g}" if first.ratio < _SURE else None
    wrong = next((each for each in figures if each.differs), None)
    if wrong is None or LIMIT * wrong.ratio >= _SURE:
        return None
    return f"{wrong.name} was at {LIMIT * wrong.ratio:.3g}"


def _same_samples(batches: StepBatches) -> Iterator[str]:
    """Yield a line for each data-parallel rank whose samples are all those of a rank before it."""
    known: dict[bytes, int] = {}
    for replica in range(batches.replicas):
        places = [batches.numbers.get((replica, at)) for at in range(batches.per_rank)]
        own = b"".join(batches.arrays[place]["tokens"].tobytes() for place in places if place is not None)
        first = known.setdefault(own, replica)
        if own and first != replica:
            yield f"data-parallel rank {replica} has the samples of rank {first}: all of its micro-batches are the same"


def _ranks(trace: Trace) -> set[int]:
    return {*trace.coordinates, *(entry.rank for entry in trace.entries), *(batch.rank for batch in trace.batches)}


def _coordinates(command: Command, trace: Trace, rank: int) -> dict[str, tuple[int, int]]:
    """Return the place of a rank: as the trace says it, and else as the command's layout.

    Megatron-LM's files tell tensor, pipeline and expert ranks; of the other axes, the first ranks have written them.
    """
    known = trace.coordinates.get(rank)
    if not known:
        return command.coordinates(rank)
    if any("dp" in axes and "cp" in axes for axes in trace.coordinates.values()):
        return dict(known)
    firsts = {axis: (0, size) for axis, size in command.sizes.items() if axis in ("cp", "dp") and size > 1}
    return firsts | {axis: at for axis, at in known.items() if axis not in firsts or at[0]}


def explain(walk: Walk, first: Judgement, sizes: Mapping[str, float]) -> list[Hypothesis]:
    """Return the hypotheses on the first tensor that differs, the best first."""

    def key(entry: Entry) -> tuple[str, str, int | None]:
        return entry.name, entry.role, walk.number_of(entry) if entry.role in OF_MODULES else None

    group = [each for each in walk.judgements if each is not first and key(each.entry) == key(first.entry)]
    return Search(Recall(walk), [first, *group[: _MOST_RANKS - 1]], sizes).run()


def correspondence(trace: Trace, model: ModelConfig) -> Correspondence:
    """Return the names and layouts of the program that wrote a trace: the one that has most of the trace's names.

    Raises CheckpointError if no program has any of them.
    """
    names = {entry.name for entry in trace.entries}
    found: list[tuple[int, Correspondence]] = []
    for program in _programs(model):
        if trace.program in ("", program.name):
            # Only Megatron-LM pads the vocabulary to such a multiple, and its checkpoints have the padding.
            unpadded = model if program.name == "megatron" else replace(model, make_vocab_size_divisible_by=1)
            known = Correspondence(
                unpadded,
                program.name,
                program.tensors,
                program.canonical,
                program.order,
                program.returns_bias,
                gradients_of=trace.gradients_of,
            )
            found.append((known.count_known(names), known))
    best = max(found, key=lambda each: each[0], default=(0, None))
    if best[1] is None or not best[0]:
        some = ", ".join(sorted(names)[:4]) or "none"
        raise CheckpointError(
            f"no name in the trace is that of a module or parameter of this network in a program that is known "
            f"(Megatron-LM, Hugging Face, torchtitan): it has {some}"
        )
    return best[1]


@dataclass(frozen=True)
class _Program:
    """Names of a program's tensors for a network, its order of dimensions, and the modules that return their bias."""

    name: str
    tensors: Sequence[FileTensor]
    order: str
    canonical: Callable[[str], str] = str
    returns_bias: re.Pattern[str] | None = None


def _programs(model: ModelConfig) -> list[_Program]:
    """Return the programs that have such a network."""
    found: list[_Program] = []
    for family in FAMILIES:
        with contextlib.suppress(CheckpointError):
            choose([family], model)
            found += [_Program("huggingface", tensors, "bsh") for tensors in forms_of(family, model).values()]
    logical = logical_tensors(model)
    own = [
        FileTensor(name, shape, ((name, Box.whole(shape), lambda values: values),)) for name, shape in logical.items()
    ]
    found.append(_Program("megalite", own, "sbh"))
    with contextlib.suppress(CheckpointError):
        tensors = tensors_of_megatron(model, logical)
        found.append(_Program("megatron", tensors, "sbh", megatron_names.canonical, _RETURNS_BIAS))
    with contextlib.suppress(CheckpointError):
        tensors, canonical = torchtitan_tensors(model, logical), partial(torchtitan_names.canonical, model=model)
        found.append(_Program("torchtitan", tensors, "bsh", canonical))
    return found


def conventions(
    command: Command, program: str, batches: StepBatches, loss_scale: float | None = None
) -> list[Convention]:
    """Return how a program may scale the loss, the way that its flags say first.

    Megatron-LM's flags tell its scale; a loop of somebody's own may divide by ranks or tokens before backward or after
    it. `program`: the one whose names the trace has. `loss_scale`: that of the step; None: the one of the flags.
    """
    counts = [float(_count(each)) for each in batches.arrays]
    total, number, ranks = sum(counts), batches.per_rank * batches.replicas, float(batches.replicas)
    scale = loss_scale or command.config.training.loss_scale or 1.0
    per_token = tuple(1.0 / total for _ in counts)
    means = tuple(1.0 / (count * number) if count else 0.0 for count in counts)
    if program == "megalite":
        return [Convention("mean over all tokens", per_token, scale)]
    if program == "megatron" and command.per_token_loss:
        # Terms of routers are multiplied with all tokens, and divided by those that count.
        tokens = sum(float(each["loss_mask"].size) for each in batches.arrays)
        return [Convention("sums over tokens", per_token, total * scale, tokens / total if total else 1.0)]
    if program == "megatron":
        return [Convention("means of micro-batches", means, ranks * command.sizes["cp"] * scale)]
    return [
        Convention("mean over all tokens", per_token if command.per_token_loss else means, factor * scale)
        for factor in dict.fromkeys((1.0, ranks, ranks * command.sizes["cp"], total))
    ]


def _weighted(command: Command, program: str, batches: StepBatches) -> Sequence[MicroBatchArrays]:
    """Return micro-batches with weights of tokens as the program has them.

    Without --calculate-per-token-loss, each context-parallel rank of Megatron-LM takes the mean of its own tokens.
    """
    parts = command.sizes["cp"]
    if program != "megatron" or command.per_token_loss or parts == 1:
        return batches.arrays
    found = []
    for arrays in batches.arrays:
        mask = arrays["loss_mask"].astype(float)
        weighted = mask.copy()
        for part in range(parts):
            own = tokens_of((part, parts), mask.shape[1]).numpy()
            weighted[:, own] *= mask.sum() / (parts * max(mask[:, own].sum(), 1.0))
        found.append(MicroBatchArrays(**{**arrays, "loss_mask": weighted}))
    return found


def _count(arrays: MicroBatchArrays) -> float:
    return float(arrays["loss_mask"].sum())


def _sizes(command: Command, batches: StepBatches, model: ModelConfig) -> dict[str, float]:
    """Return numbers that a factor may be."""
    ranks = {f"ranks on axis {axis}": float(size) for axis, size in command.sizes.items() if axis != "edp"}
    return ranks | {
        "dp": float(batches.replicas),
        "micro-batches": float(batches.per_rank),
        "experts": float(model.num_experts or 1),
        "experts of a token": float(model.moe_router_topk if model.num_experts else 1),
        "tokens": sum(map(_count, batches.arrays)),
        "features": float(model.hidden_size),
        "layers": float(model.num_layers),
    }


def figures(walk: Walk, command: Command) -> list[Figure]:
    """Return the loss and the norm of the gradient beside what they should be, if the replay has the whole step."""
    found: list[Figure] = []
    given = walk.trace.figures
    if not walk.batches.whole:
        return found
    means = [each for each in (walk.loss_sums, walk.token_means) if each]
    loss = min(means, key=lambda each: abs(each[0] - given.get("loss", 0.0)), default=[])
    both = zip(walk.replay.batches, walk.batches.arrays, strict=True)
    if any((weighted["loss_mask"] != plain["loss_mask"]).any() for weighted, plain in both):
        loss = []  # of which weighted sums do not tell the mean that is logged
    computed = {"loss": loss, "grad_norm": [math.sqrt(each) for each in walk.gradient_squares]}
    for name, values in computed.items():
        if name in given and values:
            found.append(Figure(name, given[name], values[0], _tolerance(given[name], values, command)))
    return found


def _tolerance(recorded: float, computed: Sequence[float], command: Command) -> float:
    """Return how far rounding takes a number of which there are only a few emulated values.

    Of so few the root mean square may be small by chance: three times it is what Student's distribution asks for.
    """
    truth, *others = computed
    spread = LIMIT * 3 * math.sqrt(sum((each - truth) ** 2 for each in others) / len(others))
    dtype = model_dtype(command.config)
    if float(torch.tensor(recorded, dtype=dtype)) == recorded:  # logged in the run's precision
        spread += abs(recorded) * torch.finfo(dtype).eps / 2
    return max(spread, abs(truth) * 2.0**-24)


def _notes(walk: Walk) -> list[str]:
    """Return notes on what the judgements say together."""
    parameters = [each for each in walk.judgements if each.entry.role == "parameter"]
    notes = []
    if parameters and all(each.differs for each in parameters):
        notes.append("all recorded parameters differ: the trace is of other weights than the checkpoint's")
    if walk.trace.missing:
        notes.append(f"ranks {', '.join(map(str, walk.trace.missing[:8]))} are missing in the trace")
    has_gradients = any(entry.role in OF_WEIGHTS for entry in walk.trace.entries)
    if has_gradients and not walk.batches.whole:
        notes.append("gradients of weights are sums over the step, of which the trace has not all micro-batches")
    if not any(entry.role in OF_MODULES for entry in walk.trace.entries):
        notes.append("the trace has no inputs or outputs of modules: the first difference may come from further ahead")
    return notes
