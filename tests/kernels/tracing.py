"""Trace every operation under torch.compile without a graph break, forward and backward, on fake tensors.

    python -m tests.kernels.tracing

The graphs hold the Triton kernels. Nothing is computed; a GPU is not needed, only believed in.
"""

from __future__ import annotations

import torch
import torch.utils._triton
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite_kernels.cases import Case, cases
from tests.kernels.compile import compile_only

TOKENS = 8


def trace(case: Case) -> None:
    torch.compiler.reset()
    with FakeTensorMode():
        inputs = case.make_inputs(TOKENS, "cpu")
        outputs = torch.compile(case.outputs, fullgraph=True, backend="aot_eager")(inputs)
        outputs = tuple(output for output in outputs if output.requires_grad)
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def main() -> None:
    torch.utils._triton.has_triton = lambda: True
    compile_only("sm_90")
    for case in {case.name.split()[0]: case for case in cases()}.values():  # one of each function
        trace(case)
        print(case.name, flush=True)


if __name__ == "__main__":
    main()
