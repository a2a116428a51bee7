"""Trace every operation of a network under torch.compile, forward and backward, without a graph break; and layers.

    python -m tests.kernels.tracing

The graphs hold the Triton kernels. Nothing is computed; a GPU is not needed, only believed in.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.utils._triton
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.training.kernels import compile_layers
from megalite_kernels.case import Case
from megalite_kernels.cases import cases
from tests.distributed.layout_cell import Cell, model_config
from tests.kernels.compile import compile_only

TOKENS = 8
OUTSIDE = (
    "optimizer",
    "quantization",
    "dropout",
    "grouped",
    "short_convolution",
    "recurrence",
)  # what no network runs, or has traced


def trace(case: Case) -> None:
    torch.compiler.reset()
    with FakeTensorMode():
        inputs = case.make_inputs(TOKENS, "cpu")
        outputs = torch.compile(case.outputs, fullgraph=True, backend="aot_eager")(inputs)
        outputs = tuple(output for output in outputs if output.requires_grad)
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def graphs_of_layers() -> int:
    """Return the number of graphs of two layers together, forward, on the meta device."""
    graphs: list[object] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    device = torch.device("meta")
    model = replace(model_config(Cell(family="llama", qk_layernorm=True)), vocab_size=32, num_layers=2)
    network = GPT(model, ParallelMesh(device=device), dtype=torch.bfloat16)
    compile_layers([network], keep)
    tokens = torch.zeros(2, 8, dtype=torch.int64, device=device)
    network({}, MicroBatch(tokens, tokens, None, tokens, torch.ones(2, 8, device=device), RandomKey(1, (2, 3))))
    return len(graphs)


def main() -> None:
    torch.utils._triton.has_triton = lambda: True
    compile_only("sm_90")
    inside = (case for case in cases() if case.operation not in OUTSIDE)
    for case in {case.name.split()[0]: case for case in inside}.values():  # one of each function
        trace(case)
        print(case.name, flush=True)
    print(f"layers: {graphs_of_layers()} graphs")


if __name__ == "__main__":
    main()
