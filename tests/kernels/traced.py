"""What torch.compile makes of an operation: its Triton launches in each graph, in a process without the interpreter.

torch.compile traces a launch where it finds a GPU. Here it is told of one, and tensors without memory are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.utils._triton
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from tests.kernels.compile import compile_only


def traced_launches(function: Callable[..., Sequence[Tensor]], parts: Sequence[Tensor]) -> list[int]:
    """Launches in the graph of forward and in that of backward; raises where there would be several graphs."""
    compile_only("sm_90")
    torch.utils._triton.has_triton = lambda: True
    found: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        found.append(sum("triton_kernel" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=count, bw_compiler=count))
    outputs = compiled(*parts)
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return found
