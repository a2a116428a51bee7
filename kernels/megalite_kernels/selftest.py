"""Test of the kernels on this machine's GPU: correct results, and bandwidth relative to a plain copy.

    python -m megalite_kernels.selftest [--only WORD] [--numbers]

Each operation runs at the sizes of `megalite_kernels.cases`. Its outputs and gradients are compared with those of the
reference in float64, and two runs must give the same bits. Then its bandwidth is compared with that of a copy.
`--device cpu` only checks results, in Triton's interpreter, which does not support bf16.

Exit code 0: all results are right; 1: a result is wrong; 2: there is no GPU, or no Triton.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite_kernels import cases
from megalite_kernels.case import Case
from megalite_kernels.implementation import Kernels, use
from megalite_kernels.measure import ELEMENTS, case_step, copy_rate, time_interleaved, traffic

# Largest relative norm of the error: 8 roundings of fp32, 2 of half precision. Results in float64 are sums of values
# that a kernel computed in fp32, so their tolerance is that of fp32.
TOLERANCE = {torch.float64: 5e-7, torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
TOKENS = {"cuda": (1, 1031), "cpu": (1, 3)}
EXIT_WRONG, EXIT_NOTHING_TO_TEST = 1, 2


def largest_error(case: Case, tokens: int, device: str) -> float:
    """Return the largest error of outputs and gradients relative to the tolerance.

    It is infinite if two runs differ or a result is not finite.
    """
    torch.manual_seed(tokens)
    inputs = case.make_inputs(tokens, device)
    incoming: list[Tensor] = []
    first, again = (_results(case, inputs, incoming, torch.clone) for _ in range(2))
    exact = _results(case, inputs, incoming, _wide)
    return max(_error(case, *parts) for parts in zip(first, again, exact, strict=True))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _results(
    case: Case, inputs: Sequence[Tensor], incoming: list[Tensor], copy: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Run the case on copies of the inputs. Return outputs and gradients. The first run draws incoming gradients."""
    own = [copy(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in inputs]
    outputs = case.outputs(own)
    ends = [output for output in outputs if output.requires_grad]
    if not ends:
        return list(outputs)
    if not incoming:
        incoming += [torch.randn_like(end) for end in ends]
    arriving = [gradient.to(end.dtype) for gradient, end in zip(incoming, ends, strict=True)]
    return [*outputs, *torch.autograd.grad(ends, [tensor for tensor in own if tensor.requires_grad], arriving)]


def _error(case: Case, ours: Tensor, again: Tensor, exact: Tensor) -> float:
    if not torch.equal(ours, again):
        return math.inf
    tolerance = case.tolerance or TOLERANCE.get(ours.dtype, 0.0)
    distance, allowed = (ours.double() - exact.double()).norm().item(), tolerance * exact.double().norm().item()
    if distance == 0.0:
        return 0.0
    return distance / allowed if allowed and math.isfinite(distance) else math.inf


@dataclass(frozen=True)
class Numbers:
    """Largest error of an operation relative to the tolerance, or infinity and the exception that was raised."""

    case: Case
    error: float
    failure: str = ""

    @property
    def right(self) -> bool:
        return self.error <= 1.0

    def __str__(self) -> str:
        verdict = "" if self.right else f"  <- WRONG {self.failure}"
        return f"{self.case.name:52} error {self.error:8.3g} of what is tolerated{verdict}"


def check_numbers(chosen: Sequence[Case], device: str) -> Iterator[Numbers]:
    use(Kernels("triton"))
    for case in chosen:
        try:
            yield Numbers(case, max(largest_error(case, tokens, device) for tokens in TOKENS[device]))
        except Exception as error:  # from the compiler or the driver; go on with the other operations
            yield Numbers(case, math.inf, f"{type(error).__name__}: {error}".partition("\n")[0])


@dataclass(frozen=True)
class Speed:
    """Seconds of one direction of an operation, and its bandwidth: the least bytes to read and write per second."""

    case: Case
    direction: str
    seconds: float
    rate: float

    def beside(self, copy: float) -> str:
        figures = f"{self.seconds * 1e3:8.3f} ms {self.rate / 1e9:5.0f} GB/s {self.rate / copy:4.0%} of a copy"
        return f"{self.case.name:52} {self.direction:8} {figures}"


def measure_speed(chosen: Sequence[Case], device: str, elements: int = ELEMENTS) -> Iterator[Speed]:
    """Measure the time of each case. `elements`: size of its largest input."""
    use(Kernels("triton"))
    for case in chosen:
        torch.manual_seed(0)
        inputs = case.make_inputs(max(elements // case.width, 1), device)
        needed = traffic(case, inputs)
        (times,) = time_interleaved([case_step(case, inputs)], inputs[0].device)
        for direction, seconds, moved in zip(("forward", "backward"), times, needed, strict=False):
            yield Speed(case, direction, seconds, moved / seconds)


def nothing_to_test(device: str) -> str | None:
    """Return the reason why no kernel can run here, or None if kernels can run."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return "Triton is not installed: pip install triton, in the version that this torch needs"
    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU (--device cpu tries the kernels in an interpreter)"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each operation, and return the exit status: an error, nothing to test, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="only operations with this in their line")
    parser.add_argument("--numbers", action="store_true", help="do not measure the bandwidth")
    parser.add_argument("--device", choices=TOKENS, default="cuda")
    flags = parser.parse_args(arguments)
    if flags.device == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported
    if reason := nothing_to_test(flags.device):
        print(f"selftest: nothing was tested: {reason}", file=sys.stderr)
        return EXIT_NOTHING_TO_TEST
    chosen = [case for case in cases.cases() if flags.only in f"{case.operation} {case.name}"]
    if flags.device == "cpu":
        chosen = [case for case in chosen if "bfloat16" not in case.name]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if flags.device == 'cuda' else 'interpreter'}")
    right = []
    for numbers in check_numbers(chosen, flags.device):
        print(numbers, flush=True)
        right += [numbers.case] if numbers.right else []
    if flags.device == "cuda" and not flags.numbers:
        copy = copy_rate(torch.device("cuda"))
        print(f"{'a copy':72} {copy / 1e9:5.0f} GB/s", flush=True)
        for speed in measure_speed(right, "cuda"):
            print(speed.beside(copy), flush=True)
    wrong = len(chosen) - len(right)
    verdict = f"{wrong} of {len(chosen)} operations are WRONG" if wrong else f"{len(chosen)} operations are right"
    print(f"selftest: {verdict}")
    return EXIT_WRONG if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
