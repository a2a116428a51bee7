"""Gradients of every autograd function of the project under torch.compile, to the last bit those without it.

torch 2.11 loses some (megalite_kernels/products.py says which). Other versions do not, so under these the traced graphs
are searched for what 2.11 would lose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from megalite.config.adapters import AdaptersConfig
from megalite.config.model import ModelConfig
from megalite.library.experts import _SumOverRanks
from megalite.library.layers import ColumnParallelLinear, RowParallelLinear, _Gather, _OfSamples, _Split
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.recompute import Recompute
from megalite.modules.batch_norm import SyncBatchNorm
from megalite.parallel import placement
from megalite.parallel.adapter import Adaptable, add_adapters
from megalite.parallel.context import ParallelContext
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_entropy
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.grouped import ExpertRows, _GroupedBias, grouped_linear
from megalite.parallel.initialization import initialize
from megalite.parallel.linear import _ColumnParallel, _RowParallel
from megalite.parallel.linear_cross_entropy import linear_cross_entropy
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.products import PLAIN
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.sharding import LogicalTensor, Normal, Piece, Sharding
from megalite.parallel.state import Tally
from megalite.training.kernels import compile_layers
from megalite_kernels.activation import activation, exact_geglu, geglu, sigmoid_gated, swiglu
from megalite_kernels.dropout import drop
from megalite_kernels.dropout_mask import DropoutMask
from megalite_kernels.norm import norm, residual_norm
from megalite_kernels.permutation import group_rows, permute, unpermute
from megalite_kernels.rotary import rotary_embedding
from tests.harness.close import assert_bits_equal, assert_number_close
from tests.harness.stages import loss_of

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float64, torch.bfloat16, torch.float32)
Outputs = Tensor | tuple[Tensor, ...]
Operation = tuple[Callable[..., Outputs], list[Tensor]]

ELSEWHERE = {
    "Norm": "Triton's, as are the next three: kernels write into new tensors",
    "Activation": "",
    "RoutingWeights": "",
    "Dropped": "",
    "_Begin": "of a transfer, whose messages are not traced; returns a new tensor, and rows as they come",
    "_End": "",
    "_UseOf": "returns a view",
    "_WithoutGradient": "in FurtherEmbedding, which is no layer; returns a view",
    "_AttentionByParts": "in ContextParallelCore, which is not traced",
    "_WithSink": "in LocalCore, which is not traced",
    "_OverHeads": "in HeadsNorm, which is not traced",
    "_SharedByHeads": "in LatentAttention, which is not traced",
    "_Divergence": "in SparseAttention, which is not traced, as is the next",
    "_InBlocks": "",
    "_SumOfParts": "of the loss of pairs, which is not traced; returns a new tensor",
    "_WideProduct": "on GPUs alone, in attention, which is not traced",
    "_Recurrence": "in RecurrentCore, which is not traced, as are the next four",
    "_Convolution": "",
    "_TokensBefore": "",
    "_Held": "",
    "SumOverSharers": "",
    "_BlocksOnMeta": "on the meta device, which has no numbers",
    "_InParts": "is not traced: it runs functions of parts that are compiled by themselves",
    "_Gathered": "of the trainer of a demonstration, which is not traced, as is the next",
    "_Scattered": "",
    "_ActivatedGroupedLinear": "differentiates in backward, which is not traced",
}
"""Functions without an operation here, and why."""


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def weight(dtype: torch.dtype, *shape: int, axes: dict[int, tuple[str, ...]] | None = None) -> Parameter:
    sharding = placement.split(ParallelMesh(), LogicalTensor("weight", shape, Normal(1.0), True), axes or {})
    made = Parameter(sharding, dtype, torch.device("cpu"))
    made.allocate()
    with torch.no_grad():
        made.copy_(numbers(dtype, *made.shape))
    return made


def of_tokens(sharding: Sharding) -> Piece:
    (piece,) = sharding.pieces
    return replace(piece, tensor=replace(piece.tensor, is_embedding_or_output=True))


def adapted_layers(dtype: torch.dtype) -> Iterator[tuple[str, Adaptable]]:
    """Yield layers with trained adapters, by name."""
    context = ParallelContext(ParallelMesh(), dtype=dtype)
    for make, dora in product((ColumnParallelLinear, RowParallelLinear), (False, True)):
        layer = make(context, "up_down.weight", 8, 6)
        add_adapters(layer, AdaptersConfig(lora_rank=2, use_dora=dora))
        initialize(layer, 1)
        with torch.no_grad():
            layer.b[0].copy_(numbers(dtype, 6, 2))
        yield f"{make.__name__} with {'DoRA' if dora else 'adapters'}", layer


def factors_of(layer: Adaptable) -> list[Tensor]:
    return [layer.a, *layer.b, *layer.magnitudes]


def operations(dtype: torch.dtype) -> Iterator[tuple[str, Operation]]:
    """Yield operations by name: a function, and the tensors that it is given and that have gradients."""
    mesh = ParallelMesh()
    context, world = ParallelContext(mesh), mesh.world()
    x, vector = numbers(dtype, 3, 2, 8), numbers(dtype, 8)
    yield "RMSNorm", (lambda x, w: norm(x, w, None, 1e-5), [x, vector])
    yield "LayerNorm", (lambda x, w, b: norm(x, w, b, 1e-5), [x, vector, numbers(dtype, 8)])
    yield "residual RMSNorm", (lambda x, r, w: residual_norm(x, r, w, None, 1e-5), [x, numbers(dtype, 3, 2, 8), vector])
    for gated in (swiglu, geglu, exact_geglu):
        yield gated.__name__, (lambda x, gated=gated: gated(x), [x])
    limits: dict[str, dict[str, float]] = {"quick_geglu": {}, "swiglu": {"limit": 0.5}, "geglu": {"offset": 1.0}}
    for kind, given in limits.items():
        yield f"{kind} {given}", (lambda x, kind=kind, given=given: activation(kind, **given)(x), [x])
    yield "gated output", (sigmoid_gated, [x, numbers(dtype, 3, 2, 8)])
    wide = torch.promote_types(dtype, torch.float32)
    angles = torch.arange(12, dtype=wide).view(3, 2, 1, 2)
    for interleaved, width in ((False, 4), (True, 4), (False, 6)):
        heads = [numbers(dtype, 3, 2, 2, width), numbers(dtype, 3, 2, 1, width)]
        yield (
            f"rotation of {width}, interleaved {interleaved}",
            (lambda q, k, on=interleaved: rotary_embedding(q, k, angles.cos(), angles.sin(), interleaved=on), heads),
        )
    dropped = DropoutMask(0.5, 1, 0, 0, (5, 6), (range(3),))
    yield "dropout", (lambda x: drop(x, dropped, dimension=1), [x])
    rows, permutation = numbers(dtype, 3, 4), group_rows(torch.tensor([[0, 1], [1, 0], [0, 1]]), 2)
    yield "permutation", (lambda x: permute(x, permutation), [rows])
    yield "permutation back", (lambda x: unpermute(x, permutation), [numbers(dtype, 6, 4)])
    yield "batch norm", (SyncBatchNorm(2).to(dtype), [x])
    ids = torch.tensor([[0, 3, 2], [1, 1, 0]])
    table = weight(dtype, 8, 4)
    embedding = VocabParallelEmbedding(context, table.sharding)
    embedding.weight = table
    yield "embedding", (lambda _: embedding(ids), [table])
    looked_up = VocabParallelEmbedding(context, replace(table.sharding, pieces=(of_tokens(table.sharding),)))
    add_adapters(looked_up, AdaptersConfig(lora_rank=2, lora_target_modules=("weight",)))
    initialize(looked_up.to(dtype), 1)
    with torch.no_grad():
        looked_up.b[0].copy_(numbers(dtype, 8, 2))
    yield "embedding with adapters", (lambda *_: looked_up(ids), factors_of(looked_up))
    yield "column", (lambda x, w: _ColumnParallel.apply(x, world, False, 0, PLAIN, None, w), [x, weight(dtype, 6, 8)])
    for name, function in (("row", None), ("row of activations", torch.tanh)):
        rest = world, False, False, function, PLAIN, None
        yield name, (lambda x, w, rest=rest: _RowParallel.apply(x, *rest, w), [x, weight(dtype, 6, 8)])
    for name, layer in adapted_layers(dtype):
        yield name, (lambda x, *_, layer=layer: layer(x), [x, *factors_of(layer)])
    yield "cross entropy", (lambda x: vocab_parallel_cross_entropy(x * 1.0, ids, world, 7), [numbers(dtype, 2, 3, 8)])
    yield "entropy", (lambda x: vocab_parallel_entropy(x, world, 7), [numbers(dtype, 2, 3, 8)])
    of_output = [numbers(dtype, 2, 3, 4), weight(dtype, 8, 4)]
    yield "output layer", (lambda x, w: linear_cross_entropy(x, w, ids, world, 8), of_output)
    yield "split", (lambda x: _Split.apply(x, context), [x])
    yield "gather", (lambda x: _Gather.apply(x, context), [x])
    whole = SequenceLayout(3, ((range(3),),))
    yield "samples", (lambda x: _OfSamples.apply(x, world, whole), [x])
    yield "sum over ranks", (lambda x: _SumOverRanks.apply(x, world), [x])
    groups = ExpertRows((0, 2, 3), torch.tensor([2, 3], dtype=torch.int32))
    experts = weight(dtype, 2, 5, 4, axes={0: ("ep",)})
    yield "experts", (lambda x, w: grouped_linear(x, experts, groups), [rows, experts])
    biases = weight(dtype, 2, 5, axes={0: ("ep",)})
    yield "biases of experts", (lambda w: _GroupedBias.apply(biases, groups, 5), [biases])
    tally = Tally(3, world, torch.device("cpu"), lambda sums: None)
    yield "tally", (lambda x: tally.count(torch.ones(3, dtype=torch.int64), x), [x])


NAMES = [name for name, _ in operations(torch.float64)]
IN_A_LAYER = ("RMSNorm", "LayerNorm", "swiglu", "rotation of 6, interleaved False")


def gradients(function: Callable[..., Outputs], leaves: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the outputs, and the gradients of the leaves, with another gradient for each element of the outputs."""
    found = function(*leaves)
    outputs = (found,) if isinstance(found, Tensor) else found
    outputs = tuple(output for output in outputs if output.requires_grad)
    slopes = [torch.arange(1, output.numel() + 1).to(output.dtype).view(output.shape) / 8 for output in outputs]
    return outputs, torch.autograd.grad(outputs, leaves, slopes)


def functions_of(outputs: tuple[Tensor, ...]) -> set[str]:
    """Return the names of all functions in the graph of the outputs."""
    left, found = [output.grad_fn for output in outputs], {}
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            left += [previous for previous, _ in node.next_functions]
    return {name.removesuffix("Backward") for name in found.values()}


class Results(fx.Interpreter):
    """Runs a graph and keeps the result of each operation, in order."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.results: list[Any] = []

    def run_node(self, node: fx.Node) -> Any:
        self.results.append(super().run_node(node))
        return self.results[-1]


class Checked(fx.Interpreter):
    """Runs a graph, and asserts that autograd functions return what no operation was given."""

    def call_function(self, target: Any, arguments: Any, options: Any) -> Any:
        if getattr(target, "__name__", "") == "autograd_function_apply":
            forward, _, *inputs = arguments
            graph = Results(forward)
            *results, (outputs, _) = graph.run(*inputs) and graph.results
            for output in outputs:
                times = sum(result is output for result in results)
                assert times == 1, f"returns what an in-place or no-op call returned:\n{forward.graph}"
        return super().call_function(target, arguments, options)


def checked(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Be a compiler that generates nothing, and checks the graph where it has no other outputs than forward."""
    return graph.forward if RETURNS_INTERMEDIATES else Checked(graph).run


RETURNS_INTERMEDIATES = torch.__version__.startswith("2.11.")
"""torch 2.11 returns all intermediate results, too, which is its fault; here gradients tell."""


def assert_same(function: Callable[..., Outputs], compiled: Callable[..., Outputs], leaves: list[Tensor]) -> None:
    expected, found = gradients(function, leaves), gradients(compiled, leaves)
    for theirs, ours in zip(chain(*expected), chain(*found), strict=True):
        assert_bits_equal(ours, theirs, "an output or a gradient")


@pytest.mark.wide_except("RMSNorm")
@pytest.mark.parametrize("name", IN_A_LAYER)
def test_gradients_of_an_operation_are_those_without_compilation(name: str) -> None:
    """In float64, in which nothing is rounded, so that most operations on the result have nothing to do."""
    function, leaves = dict(operations(torch.float64))[name]
    torch.compiler.reset()
    assert_same(function, torch.compile(function, backend=checked, dynamic=False), leaves)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_operations_are_those_without_compilation(name: str, dtype: torch.dtype) -> None:
    """Also of those that are in no compiled layer: a program may compile what it makes of the library's parts."""
    function, leaves = dict(operations(dtype))[name]
    torch.compiler.reset()
    assert_same(function, torch.compile(function, backend=checked, dynamic=False), leaves)


MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=20, vocab_size=24,
    make_vocab_size_divisible_by=8, init_method_std=0.3, hidden_dropout=0.0, attention_dropout=0.0,
    position_embedding_type="rope", normalization="RMSNorm", qk_layernorm=True, swiglu=True, add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
MODELS = {
    "llama": MODEL,
    "gemma": replace(MODEL, apply_layernorm_1p=True, sandwich_norm=True, swiglu=False, geglu=True, rotary_percent=0.5),
    "neox": replace(MODEL, normalization="LayerNorm", add_bias_linear=True, swiglu=False, use_parallel_residual=True),
}


@pytest.mark.wide
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_network_are_those_without_compilation(name: str, dtype: torch.dtype) -> None:
    made = GPT(MODELS[name], ParallelMesh(), dtype=dtype)
    initialize(made, 1)
    text = torch.arange(2 * 9).view(2, 9) * 5 % 23
    positions, mask = torch.arange(8).expand(2, -1), torch.ones(2, 8, dtype=dtype)
    batch = MicroBatch(text[:, :-1], positions, None, text[:, 1:], mask, RandomKey(1, (2, 3)))
    weights = list(made.parameters())
    expected = gradients(lambda *_: loss_of(made, batch), weights)
    torch.compiler.reset()
    compile_layers([made], checked)
    found = gradients(lambda *_: loss_of(made, batch), weights)
    for theirs, ours in zip(chain(*expected), chain(*found), strict=True):
        assert_bits_equal(ours, theirs, "the loss or a gradient")
    assert counters["stats"]["unique_graphs"]


@pytest.mark.wide
def test_a_network_without_parts_is_not_run_with_what_one_with_parts_has_compiled() -> None:
    torch.compiler.reset()
    tokens = torch.arange(8).view(1, 8)
    losses = []
    for parts in (2, 1):
        recompute = Recompute(mlp_parts=parts)
        made = GPT(replace(MODEL, num_layers=1), ParallelMesh(), dtype=torch.float64, recompute=recompute)
        initialize(made, 1)
        compile_layers([made], "eager")
        batch = MicroBatch(tokens, tokens, None, tokens, torch.ones(1, 8, dtype=torch.float64), RandomKey(1, (2,)))
        losses.append(loss_of(made, batch).item())
    assert_number_close(*losses, "loss")


def test_every_autograd_function_is_here() -> None:
    sources = [*ROOT.glob("megalite/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    written = {
        name for path in sources for name in re.findall(r"class (\w+)\(torch\.autograd\.Function\)", path.read_text())
    }
    tried = [functions_of(gradients(*operation)[0]) for _, operation in operations(torch.float64)]
    assert written == (set().union(*tried) & written) | ELSEWHERE.keys()
