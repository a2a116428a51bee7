"""Layers of each pipeline stage, and the rank of each stage, from the flags.

Layouts as letters (`--pipeline-model-parallel-layout`) have Megatron-LM's syntax: E is the embedding, t a layer, m a
depth of multi-token prediction, L the output layer and the loss; | begins the next stage. x*n repeats a letter or |.
(..)*n repeats the text between the parentheses, which cannot be nested. Commas are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from megalite.config.fields import given
from megalite.config.layer_specs import NEXT_STAGE, PATTERN_FLAG, specs_of_letters
from megalite.config.model import ModelConfig
from megalite.config.parallel import SHAPES, ParallelConfig, ScheduleName, Shape
from megalite.errors import ConfigurationError
from megalite.small_files import shown

AUTO = "auto"
_FLAG = "--pipeline-model-parallel-layout"
_MOST_LETTERS = 100_000
_FOREIGN = {
    "(": "a bracket must be closed, contain no other, and be followed by a count, as in (tt|)*3",
    ")": "a bracket must be opened, contain no other, and be followed by a count, as in (tt|)*3",
    "*": "* must be between a letter, | or bracket and a count, as in t*3",
}
_NUMBERS_OF_STAGES = """num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    pipeline_model_parallel_layout"""
_FIRST_AND_LAST = "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"
_ACCOUNTS = "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
STAGE_FIELDS = (*_NUMBERS_OF_STAGES.split(), *_FIRST_AND_LAST.split(), *_ACCOUNTS.split())
"""Fields that say how many stages there are, and what each contains."""


@dataclass(frozen=True)
class StageLayers:
    """Contents of one stage: `layers` layers from number `first_layer` on, and perhaps the embedding or the loss."""

    first_layer: int
    layers: int
    embedding: bool
    loss: bool

    def __str__(self) -> str:
        parts = ["embedding"] * self.embedding
        if self.layers:
            parts.append(_numbers("layer", self.first_layer, self.first_layer + self.layers - 1))
        return ", ".join(parts + ["loss"] * self.loss) or "nothing"


def with_stages_of_pattern(model: ModelConfig, parallel: ParallelConfig) -> tuple[ModelConfig, ParallelConfig]:
    """Return the same two, but that stages of a pattern of layers are those of --pipeline-model-parallel-layout.

    Raises:
        ConfigurationError: a letter has no layer, other flags say what a stage contains, or the ranks cannot have equal
            numbers of stages.
    """
    pattern, ranks = model.hybrid_layer_pattern, parallel.pipeline_model_parallel_size
    if pattern is None or NEXT_STAGE not in pattern:
        return model, parallel
    specs_of_letters(pattern)
    what, stages = f"{PATTERN_FLAG} {shown(pattern)}", pattern.split(NEXT_STAGE)
    if others := given(parallel, " ".join(STAGE_FIELDS)):
        raise ConfigurationError(
            "\n".join(f"{what} says by {NEXT_STAGE} what each stage contains: leave {flag} out" for flag in others)
        )
    over = f"{ranks} ranks (--pipeline-model-parallel-size): add or drop {NEXT_STAGE}"
    _divided_evenly(f"{len(stages)} stages of {what}", len(stages), ranks, over)
    layout = f"E{NEXT_STAGE.join('t' * len(stage) for stage in stages)}L"
    return replace(model, hybrid_layer_pattern="".join(stages)), replace(
        parallel, pipeline_model_parallel_layout=layout
    )


def is_automatic(parallel: ParallelConfig) -> bool:
    """Tell whether the contents of the stages are to be chosen before the run: by `auto`, or by `auto:FILE`."""
    layout = parallel.pipeline_model_parallel_layout
    return layout is not None and layout.partition(":")[0] == AUTO


def leaves_layout_open(parallel: ParallelConfig) -> bool:
    """Tell whether a run's layout is to be written out before the run: its stages, or its classes of devices."""
    return is_automatic(parallel) or parallel.device_classes is not None


def virtual_stages(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the number of stages per rank. Raises ConfigurationError if they cannot be divided evenly."""
    ranks = parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is not None:
        stages = stages_of_letters(parallel.pipeline_model_parallel_layout)
        what = f"{len(stages)} stages of --pipeline-model-parallel-layout {parallel.pipeline_model_parallel_layout!r}"
        return _divided_evenly(
            what, len(stages), ranks, f"{ranks} ranks (--pipeline-model-parallel-size): add or drop |"
        )
    each = parallel.num_layers_per_virtual_pipeline_stage
    if each is not None:
        what, layers = _layers_to_share(model, parallel)
        of_rank = _divided_evenly(what, layers, ranks, f"{ranks} ranks (--pipeline-model-parallel-size)")
        stages_of = f"stages of {each} (--num-layers-per-virtual-pipeline-stage)"
        return _divided_evenly(f"{of_rank} layers per rank", of_rank, each, stages_of)
    return parallel.num_virtual_stages_per_pipeline_rank or shape(parallel).chunks or 1


def shape(parallel: ParallelConfig) -> Shape:
    """Return the shape of the schedule that the flags name; without one, stages are assigned to the ranks in turn."""
    return SHAPES[parallel.pipeline_schedule] if parallel.pipeline_schedule is not None else Shape()


def schedule_name(chunks: int, parallel: ParallelConfig) -> ScheduleName:
    """Return the name of the schedule of `chunks` stages per rank, or of the default one if no flag gives it."""
    return parallel.pipeline_schedule or ("interleaved-1f1b" if chunks > 1 else "1f1b")


def stage_layers(model: ModelConfig, parallel: ParallelConfig) -> tuple[StageLayers, ...]:
    """Return the contents of each stage, of all ranks, in the order in which a micro-batch passes through them.

    Raises:
        ConfigurationError: the layers cannot be divided evenly; the message names the numbers.
    """
    chunks = virtual_stages(model, parallel)
    if parallel.pipeline_model_parallel_layout is not None:
        layers = layers_of_letters(parallel.pipeline_model_parallel_layout, model)
    elif parallel.decoder_first_pipeline_num_layers is None and parallel.decoder_last_pipeline_num_layers is None:
        layers = _even(model, parallel, chunks)
    else:
        over = f"its {chunks} stages: change --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        of_ranks = [
            _divided_evenly(f"{count} layers of one rank", count, chunks, over) for count in _uneven(model, parallel)
        ]
        layers = [of_ranks[rank] for rank in _ranks_of_stages(parallel, chunks)]
    last = len(layers) - 1
    stages = tuple(
        StageLayers(end - count, count, embedding=stage == 0, loss=stage == last)
        for stage, (end, count) in enumerate(zip(accumulate(layers), layers, strict=True))
    )
    check_choices(model, stages)
    return stages


def check_choices(model: ModelConfig, stages: Iterable[StageLayers]) -> None:
    """Raise ConfigurationError if a layer of sparse attention would attend to what one of another stage has chosen."""
    if "sparse_attention" not in model.kinds:  # or layers are not known, which is reported elsewhere
        return
    flags = f"--dsa-indexer-topk-freq {model.dsa_indexer_topk_freq}"
    flags += f" and --dsa-indexer-skip-topk-offset {model.dsa_indexer_skip_topk_offset}"
    for number, stage in enumerate(stages):
        layers = model.layers[stage.first_layer : stage.first_layer + stage.layers]
        first = next((layer for layer in layers if layer.mixer == "sparse_attention"), None)
        if first is not None and not first.chooses:
            raise ConfigurationError(
                f"the first layer of sparse attention of stage {number} has no indexer ({flags}, which count layers of "
                "all kinds), and what another stage has chosen does not reach it: change them, or divide the layers "
                "otherwise"
            )


def layout_lines(model: ModelConfig, parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the layout as text: the number of layers and stages, then the stages of each rank.

    Neighbouring ranks with the same numbers of layers share a line.
    """
    stages, chunks = stage_layers(model, parallel), virtual_stages(model, parallel)
    ranks: list[list[StageLayers]] = [[] for _ in range(parallel.pipeline_model_parallel_size)]
    for rank, stage in zip(_ranks_of_stages(parallel, chunks), stages, strict=True):
        ranks[rank].append(stage)
    held, schedule = sum(stage.layers for stage in stages), schedule_name(chunks, parallel)
    each = f", {chunks} per rank" if chunks > 1 else ""
    further = f"{model.depths} further depth{'s' if model.depths > 1 else ''}"
    depths = f" and {further} on the last one" if model.depths else ""
    lines = [f"{held} layers in {len(stages)} stage{'s' if len(stages) > 1 else ''}{each}{depths}, schedule {schedule}"]
    alike = groupby(range(len(ranks)), lambda rank: [(s.layers, s.embedding, s.loss) for s in ranks[rank]])
    for kind, numbers in alike:
        group = list(numbers)
        name = _numbers("rank", group[0], group[-1])
        columns = zip(*(ranks[rank] for rank in group), strict=True)
        held_by_each = f" ({' + '.join(str(layers) for layers, _, _ in kind)} each)" if len(group) > 1 else ""
        lines.append(f"{name}: {'; '.join(str(_joined(column)) for column in columns)}{held_by_each}")
    return tuple(lines)


def layers_of_ranks(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Return the number of layers of each pipeline rank, over all its stages. Raises ConfigurationError."""
    stages, found = stage_layers(model, parallel), [0] * parallel.pipeline_model_parallel_size
    for rank, stage in zip(_ranks_of_stages(parallel, virtual_stages(model, parallel)), stages, strict=True):
        found[rank] += stage.layers
    return found


def _joined(stages: Sequence[StageLayers]) -> StageLayers:
    """Join the stages of neighbouring ranks, in ascending or descending order of layers, into one."""
    first, layers = min(stage.first_layer for stage in stages), sum(stage.layers for stage in stages)
    return StageLayers(first, layers, any(stage.embedding for stage in stages), any(stage.loss for stage in stages))


def _ranks_of_stages(parallel: ParallelConfig, chunks: int) -> list[int]:
    """Return the rank of each stage. Stages are assigned to the ranks in rounds; in a V shape, every other round is in
    reverse order."""
    ranks, v_shaped = range(parallel.pipeline_model_parallel_size), shape(parallel).v_shaped
    return [rank for chunk in range(chunks) for rank in (ranks[::-1] if v_shaped and chunk % 2 else ranks)]


def _even(model: ModelConfig, parallel: ParallelConfig, chunks: int) -> list[int]:
    """Return equal numbers of layers for all stages; the embedding and the loss may count as one layer each."""
    what, layers = _layers_to_share(model, parallel)
    ranks = parallel.pipeline_model_parallel_size
    count = ranks * chunks
    stages = f"{count} stages (--pipeline-model-parallel-size {ranks}{f' x {chunks} per rank' if chunks > 1 else ''})"
    if parallel.mtp_standalone and count == 1:
        raise ConfigurationError("--mtp-standalone needs --pipeline-model-parallel-size 2 or more: there is one stage")
    if parallel.mtp_standalone:
        stages, count = f"{count - 1} stages, all but that of --mtp-standalone", count - 1
    if count > layers:
        raise ConfigurationError(f"{stages} are more than {what}: use fewer")
    each = _divided_evenly(what, layers, count, f"{stages}: change one, or use --pipeline-model-parallel-layout")
    stage_sizes = [each] * count + [0] * parallel.mtp_standalone
    stage_sizes[0] -= parallel.account_for_embedding_in_pipeline_split
    stage_sizes[-1] -= parallel.account_for_loss_in_pipeline_split
    return stage_sizes


def _uneven(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Return the number of layers of each rank if the first or the last rank has a different number."""
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    ends = (("first", first), ("last", last))
    given = [f"--decoder-{end}-pipeline-num-layers {count}" for end, count in ends if count is not None]
    others = parallel.pipeline_model_parallel_size - len(given)
    rest = model.num_layers - (first or 0) - (last or 0)
    what = f"{model.layers_flag} less {' and '.join(given)} leaves {rest} layers, which"
    over = f"{others} other ranks (--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size})"
    if rest < others or (rest and not others):
        raise ConfigurationError(f"{what} cannot be divided among {over}")
    middle = [_divided_evenly(what, rest, others, over)] * others if others else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def _layers_to_share(model: ModelConfig, parallel: ParallelConfig) -> tuple[str, int]:
    """Return what the stages share evenly, as text and as a number."""
    words, count = model.layers_flag, model.num_layers
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if getattr(parallel, name):
            words, count = f"{words} + 1 (--{name.replace('_', '-')})", count + 1
    return words, count


def _divided_evenly(what: str, count: int, parts: int, over: str) -> int:
    """Return `count` divided by `parts`. Raises ConfigurationError if there is a remainder."""
    if count % parts:
        raise ConfigurationError(f"{what} cannot be divided evenly among {over}")
    return count // parts


def _numbers(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first}-{last}"


def stages_of_letters(layout: str) -> list[str]:
    """Return the letters of each stage, in order, without repeats. Raises ConfigurationError for unknown letters."""
    text = _written_out(layout)
    for letter in text:
        if letter not in "EtmL|":
            meaning = _FOREIGN.get(
                letter, f"{letter!r} is unknown: E embedding, t layer, m depth, L loss, | next stage"
            )
            raise ConfigurationError(f"{_FLAG} {shown(layout)}: {meaning}")
    return text.split("|")


def layers_of_letters(layout: str, model: ModelConfig) -> list[int]:
    """Return the number of layers of each stage, in order.

    Raises:
        ConfigurationError: the embedding is not first, the loss with the depths is not last, or the number of layers or
            depths is wrong.
    """
    stages = stages_of_letters(layout)
    letters = "".join(stages)
    ends = (("E", "the embedding", "first", stages[0][:1]), ("L", "the loss", "last", stages[-1][-1:]))
    for letter, name, place, there in ends:
        count = letters.count(letter)
        if count != 1 or there != letter:
            found = f"{count} times" if count != 1 else "elsewhere"
            raise ConfigurationError(
                f"{_FLAG} {shown(layout)}: {letter} ({name}) must be there once, {place} of all, not {found}"
            )
    depths = letters.count("m")
    if depths and not model.depths:
        raise ConfigurationError(f"{_FLAG} {shown(layout)}: m is a depth, and needs --mtp-num-layers")
    if depths not in (0, model.depths) or not stages[-1].endswith("m" * depths + "L"):
        raise ConfigurationError(
            f"{_FLAG} {shown(layout)}: m is a depth of --mtp-num-layers {model.depths}: give all of them right before "
            "L in its stage, or none, which means the same"
        )
    layers = [stage.count("t") for stage in stages]
    if sum(layers) != model.num_layers:
        raise ConfigurationError(
            f"{_FLAG} {shown(layout)} has {sum(layers)} layers (t), which is not {model.layers_flag}: make them equal"
        )
    return layers


def _written_out(layout: str) -> str:
    """Return `layout` without commas and with repeats expanded, those of parentheses first."""
    room = _MOST_LETTERS - len(layout)

    def repeated(match: re.Match[str]) -> str:
        nonlocal room
        if len(match[2].lstrip("0")) > 4 or (room := room - len(match[1]) * int(match[2])) < 0:
            raise ConfigurationError(f"{_FLAG}: *{match[2][:20]} is more layers than any model has")
        return match[1] * int(match[2])

    text = layout.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*([0-9]+)", r"([EtmL|])\*([0-9]+)"):
        text = re.sub(pattern, repeated, text)
    return text


def pipeline_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold. Layers are counted only if no flags contradict each other."""
    contradictions = list(_contradictions(parallel))
    if contradictions:
        yield from contradictions
        return
    try:
        stage_layers(model, parallel)
    except ConfigurationError as error:
        yield str(error)
    else:
        yield from _schedule(model, parallel)


def why_nothing_is_aligned(chunks: int, parallel: ParallelConfig) -> str | None:
    """Return why the pipeline's ranks, of `chunks` stages each, have no reductions that could begin together; None if
    they have some."""
    if not parallel.overlap_grad_reduce:
        return "without --overlap-grad-reduce"
    if parallel.zero_stage >= 2:
        return "since gradients are reduced after every micro-batch (ZeRO 2 and 3)"
    if shape(parallel).v_shaped:
        return f"with {parallel.pipeline_schedule}, whose chunks end in another order"
    return "with one stage per rank" if chunks == 1 else None


def _contradictions(parallel: ParallelConfig) -> Iterator[str]:
    """Refuse flags that set the same thing in two ways, or that need a pipeline if there is none."""
    ways = given(parallel, _NUMBERS_OF_STAGES)
    if len(ways) > 1:
        yield f"{' and '.join(ways)} each set the stages per rank: keep one"
    ends, accounts = given(parallel, _FIRST_AND_LAST), given(parallel, _ACCOUNTS)
    if parallel.pipeline_model_parallel_layout is not None:
        for flag in (*ends, *accounts):
            yield f"--pipeline-model-parallel-layout says what each stage contains: leave {flag} out"
    elif ends and accounts:
        yield f"{' and '.join((*ends, *accounts))} are two ways to make stages uneven: choose one"
    elif ends and parallel.num_layers_per_virtual_pipeline_stage is not None:
        yield f"{ends[0]} needs --num-virtual-stages-per-pipeline-rank in place of {ways[0]}"
    if ends and parallel.pipeline_model_parallel_size == 1:
        yield f"{' and '.join(ends)}: --pipeline-model-parallel-size is 1, so there is one rank: leave it out"


def _schedule(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Refuse a schedule that does not support this number of stages per rank."""
    ranks, name = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
    chunks, taken = virtual_stages(model, parallel), shape(parallel).chunks
    if name is not None and taken is None and chunks == 1:
        yield f"--pipeline-schedule {name} needs several stages per rank: --num-virtual-stages-per-pipeline-rank"
    elif name is not None and taken not in (None, chunks):
        wanted, other = ("one stage", ": interleaved-1f1b is for several") if taken == 1 else (f"{taken} stages", "")
        yield f"--pipeline-schedule {name} needs {wanted} per rank, not {chunks}{other}"
    elif taken != chunks and chunks > 1 and ranks == 1:
        yield f"{chunks} stages per rank need --pipeline-model-parallel-size 2 or more"
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None:
        flag = f"--microbatch-group-size-per-virtual-pipeline-stage {group}"
        if schedule_name(chunks, parallel) != "interleaved-1f1b":
            yield f"{flag} needs several stages per rank, and the schedule interleaved-1f1b"
        elif group < ranks:
            yield f"{flag} is less than --pipeline-model-parallel-size {ranks}: each group must keep all ranks busy"
