"""Validation of sums in fixed point, which give the same bits whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.run import TaskConfig

FLAG = "--bitwise-elastic"


def bitwise_problems(config: TaskConfig) -> Iterator[str]:
    """Yield a line for each option whose bits depend on the number of ranks all the same."""
    if not config.parallel.bitwise_elastic:
        return
    parallel, training, optimizer = config.parallel, config.training, config.optimizer
    if not training.deterministic_mode:
        yield f"{FLAG} needs --deterministic-mode: otherwise kernels of a GPU may add in another order each time"
    if training.fp16:
        yield f"{FLAG} and --fp16: the loss scale moves gradients beyond the grid; train in bf16"
    if parallel.expert_model_parallel_size > 1:
        yield (
            f"{FLAG} and --ep {parallel.expert_model_parallel_size}: a rank's experts compute the tokens of several "
            "data-parallel ranks in one product, whose bits depend on how many there are; with --ep 1 they do not"
        )
    if parallel.grad_reduce_in_bf16:
        yield f"{FLAG} and --grad-reduce-in-bf16: fixed point needs gradients in fp64; drop one of them"
    for name, dtype in optimizer.narrow.items():
        if name == "main_grads_dtype" or dtype in ("int8", "fp8"):
            why = "needs gradients in fp64" if name == "main_grads_dtype" else "has moments whose scales are of slices"
            yield f"{FLAG} and --{name.replace('_', '-')} {dtype}: a run {why}; drop one of them"
    if config.offload.optimizer_cpu_offload:
        yield f"{FLAG} and --optimizer-cpu-offload: host and device may round differently; drop one of them"
    if not config.synchronization.is_plain:
        yield f"{FLAG}: compressed, late or local updates depend on the number of ranks; drop it, or their flags"
