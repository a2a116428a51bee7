"""Validation of the dry run's memory on what Megatron-LM's functional tests measured; writes memory_validation.md.

    python -m benchmarks.planner.validate_memory

The dry run is of megalite's own code, so it has what both programs hold: parameters, gradients, optimizer state. What
Megatron-LM and its libraries hold beside it is added by two rules. It takes about twenty minutes on two cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.planner.measured_memory import Case, measured, rows
from benchmarks.planner.tables import table
from megalite.config import RunConfig
from megalite.config.pipeline_layout import schedule_name, shape, stage_layers, virtual_stages
from megalite.config.validate import resolve
from megalite.extras.planner.dry_run import dry_run
from megalite.extras.planner.memory import in_flight
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.stages import Stages
from megalite.training.builder import model_dtype

PAGE = Path(__file__).with_name("memory_validation.md")
MIB = 2**20
FAR = 0.02
_PRODUCTS, _PRODUCTS_OF_AMPERE = 32 * MIB, 8 * MIB + 128 * 1024
"""Workspace that PyTorch gives cuBLAS, and a second time cuBLASLt: the larger one also by CUBLAS_WORKSPACE_CONFIG,
which Megatron-LM's deterministic mode demands."""
_ENGINE, _ENGINE_OF_AMPERE = 32 * MIB, 4 * MIB
"""Workspace of Transformer Engine's products. Layers with experts have it, whatever the flags say."""
_GROUPED_STREAMS = 4
"""Streams on which its grouped products run, with a workspace each."""
_SCORE_BYTES = 5
UNFUSED = "not fused, with scores"


@dataclass(frozen=True)
class Found:
    """Case with the bytes of its last rank before a step and at most, by a dry run."""

    case: Case
    held: int
    most: int

    @property
    def added(self) -> int:
        """Bytes of the libraries' workspaces and of the messages that Megatron-LM holds after a step."""
        return workspaces(self.case) + messages(self.case)

    @property
    def static_error(self) -> float:
        return (self.held + self.added) / self.case.static - 1

    @property
    def peak_error(self) -> float:
        return (self.most + self.added) / self.case.peak - 1

    @property
    def explained_error(self) -> float:
        """Error of the peak if what Megatron-LM's loss and attention keep is added."""
        return (self.most + self.added + wide_logits(self.case) + scores(self.case)) / self.case.peak - 1


def workspaces(case: Case) -> int:
    """Return the bytes that the libraries of products take through PyTorch."""
    ampere = case.gpu.startswith("A100")
    large = not ampere or "--deterministic-mode" in case.flags
    products = _PRODUCTS if large else _PRODUCTS_OF_AMPERE
    if not case.of_transformer_engine and case.config.model.num_experts is None:
        return products
    streams = 1 + _GROUPED_STREAMS * ("--moe-grouped-gemm" in case.flags)
    return 2 * products + streams * (_ENGINE_OF_AMPERE if ampere else _ENGINE)


def messages(case: Case) -> int:
    """Return the bytes of what Megatron-LM's stages have last received: a state and a gradient per chunk."""
    config = resolve(case.config, case.gpus)
    if config.parallel.pipeline_model_parallel_size == 1:
        return 0
    split = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    state = _tokens(case) * config.model.hidden_size * model_dtype(config).itemsize // split
    return 2 * virtual_stages(config.model, config.parallel) * state


def wide_logits(case: Case) -> int:
    """Return the bytes of a micro-batch's logits in fp32, which a loss without fusion makes and megalite's does not."""
    tensor = case.config.parallel.tensor_model_parallel_size
    if "--cross-entropy-loss-fusion" in case.flags:
        return 0
    return 4 * _tokens(case) * case.config.model.padded_vocab_size(tensor) // tensor


def scores(case: Case) -> int:
    """Return the bytes of the scores that attention without fusion keeps, of the micro-batches in flight: two of
    softmax, two of dropout and one of its mask. megalite's attention keeps none on a GPU."""
    config = resolve(case.config, case.gpus)
    if kind(case) != UNFUSED or config.training.recompute_granularity is not None:
        return 0
    parallel, length = config.parallel, config.data.seq_length
    chunks = virtual_stages(config.model, parallel)
    stages = Stages(parallel.pipeline_model_parallel_size, chunks, shape(parallel).v_shaped)
    samples = config.training.micro_batch_size * parallel.data_parallel_size(case.gpus)
    count = (config.training.global_batch_size or samples) // samples
    *_, last = orders_of(SCHEDULES[schedule_name(chunks, parallel)], stages, count, None)
    own = [stage_layers(config.model, parallel)[stage] for stage in stages.of_rank(stages.ranks - 1)]
    specs = [config.model.layers[each.first_layer : each.first_layer + each.layers] for each in own]
    layers = [sum(spec.mixer == "attention" for spec in of_stage) for of_stage in specs]
    most = max(sum(map(int.__mul__, moment, layers)) for moment in in_flight(last))
    heads = config.model.num_attention_heads // parallel.tensor_model_parallel_size
    each = config.training.micro_batch_size * heads * length**2 // parallel.context_parallel_size
    return _SCORE_BYTES * each * most


def _tokens(case: Case) -> int:
    """Return the tokens of a rank's micro-batch."""
    config = case.config
    return config.training.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size


def kind(case: Case) -> str:
    """Return what decides which scores of attention are kept."""
    if "unfused" in case.flags or not case.of_transformer_engine:
        return UNFUSED
    return "fused, with dropout" if case.config.model.attention_dropout else "fused, without dropout"


def layers_of(case: Case) -> str:
    """Return whose layers a case has, or that its optimizer is Muon."""
    if case.config.optimizer.optimizer == "muon":
        return "Muon"
    if case.config.model.hybrid_layer_pattern is not None:
        return "patterns with Mamba-2"
    if "--moe-grouped-gemm" in case.flags:
        return "layers with experts, grouped products"
    if case.config.model.num_experts is not None:
        return "layers with experts"
    return "Transformer Engine's layers" if case.of_transformer_engine else "Megatron-LM's own layers"


def found_by(cases: Sequence[Case]) -> Iterator[Found]:
    """Yield the figures of each case. Cases with the same flags on as many GPUs are run once."""
    known: dict[tuple[int, tuple[str, ...]], tuple[int, int]] = {}
    for case in cases:
        key = case.gpus, case.flags
        if key not in known:
            run = dry_run(_runnable(case.config), case.gpus, case.gpus - 1)
            known[key] = run.before, run.peak
        yield Found(case, *known[key])


def _runnable(config: RunConfig) -> RunConfig:
    """Return a run without the dropout that is refused on context-parallel GPUs, and that keeps no memory there."""
    if config.parallel.context_parallel_size == 1:
        return config
    return replace(config, model=replace(config.model, attention_dropout=0.0))


def line(found: Found) -> tuple[str, ...]:
    """Return a case's row of the page's last table."""
    case = found.case
    sizes = (case.static, found.held + found.added, case.peak, found.most + found.added)
    static, expected, peak, most = (f"{size / MIB:,.1f}" for size in sizes)
    return (
        case.name,
        case.gpu,
        str(case.gpus),
        static,
        expected,
        f"{found.static_error:+.1%}",
        peak,
        most,
        f"{found.peak_error:+.0%}",
    )


def page(found: Sequence[Found]) -> str:
    """Return the page."""
    reasons = Counter(measured()[1].values())
    lines = [
        "# Validation of memory",
        "",
        "Written by `python -m benchmarks.planner.validate_memory` from `benchmarks/planner/measured_memory.csv`: what",
        "Megatron-LM's functional tests measure on the last rank after a step (static) and at most (peak), as PyTorch",
        "allocates it, beside a dry run of megalite with the same flags (`--dry-run`). CUDA's context and NCCL are in",
        "neither. To the dry run are added",
        "",
        "- workspaces of products, 96 MiB on H100 and GB200, 68 MiB on A100: twice 32 MiB for cuBLAS (8 MiB on A100",
        "  without `CUBLAS_WORKSPACE_CONFIG`) and 32 MiB (A100: 4 MiB) for Transformer Engine; 32 MiB without it, and",
        "  128 MiB (16 MiB) more for its grouped products;",
        "- what Megatron-LM's stages last received: a state and a gradient of a micro-batch for each chunk of the",
        "  rank.",
        "",
        f"Of {len(rows())} rows, {len(found)} are compared. megalite itself has run on none of these GPUs.",
        "",
        "## Static memory",
        "",
        *table(("cases of", "number", "median", "worst", "within 2 %"), _statics(found)),
        "",
        "## Peak",
        "",
        "Both programs hold the same after a step, but not during one: they differ in what attention and the loss",
        "keep.",
        "The last columns are of the error if logits in fp32 are added, which Megatron-LM's loss without fusion makes,",
        "and five bytes for each score that its attention without fusion keeps.",
        "",
        *table(("cases of", "attention", "number", "median", "worst", "median, added", "worst, added"), _peaks(found)),
        "",
        "## Rows that are not compared",
        "",
        *table(("reason", "rows"), reasons.most_common()),
        "",
        "## Cases whose static memory is more than 2 % off",
        "",
        "Some cases on GB200 without `CUBLAS_WORKSPACE_CONFIG` hold 48 MiB less than others: as much as the smaller",
        "workspaces would save. Megatron-LM's own layers hold up to 184 MiB that nothing here explains, and its",
        "distributed Muon 282 MiB more than megalite's.",
        "",
        *_far(found),
        "",
        "## All cases",
        "",
        "MiB of the last rank: measured, predicted and error, static and at the peak.",
        "",
        *table(("case", "GPU", "GPUs", "static", "predicted", "error", "peak", "predicted", "error"), map(line, found)),
    ]
    return "\n".join(lines) + "\n"


def _statics(found: Sequence[Found]) -> Iterator[tuple[object, ...]]:
    groups: dict[str, list[float]] = {}
    for name in ("all", *dict.fromkeys(each.case.gpu for each in found), *dict.fromkeys(map(_layers, found))):
        groups[name] = [each.static_error for each in found if name in ("all", each.case.gpu, _layers(each))]
    for name, errors in groups.items():
        near = sum(abs(error) <= FAR for error in errors) / len(errors)
        yield name, len(errors), f"{median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}", f"{near:.0%}"


def _layers(found: Found) -> str:
    return layers_of(found.case)


def _peaks(found: Sequence[Found]) -> Iterator[tuple[object, ...]]:
    for names in sorted({(_layers(each), kind(each.case)) for each in found}):
        own = [each for each in found if (_layers(each), kind(each.case)) == names]
        errors, explained = [each.peak_error for each in own], [each.explained_error for each in own]
        figures = (median(errors), max(errors, key=abs), median(explained), max(explained, key=abs))
        yield *names, len(own), *(f"{figure:+.0%}" for figure in figures)


def _far(found: Sequence[Found]) -> Iterator[str]:
    far = sorted((each for each in found if abs(each.static_error) > FAR), key=lambda each: -abs(each.static_error))
    yield from table(
        ("case", "GPU", "error", "missing MiB"),
        (
            (
                each.case.name,
                each.case.gpu,
                f"{each.static_error:+.1%}",
                f"{(each.case.static - each.held - each.added) / MIB:+.0f}",
            )
            for each in far
        ),
    )


def main() -> None:
    """Run all cases and write the page."""
    found = list(found_by(measured()[0]))
    PAGE.write_text(page(found))
    errors = [abs(each.static_error) for each in found]
    print(f"static: median {median(errors):.1%}, worst {max(errors):.1%}, of {len(found)} cases: {PAGE}")


if __name__ == "__main__":
    main()
