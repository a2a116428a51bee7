"""CPU time of a layer with experts, as ratios: against a dense layer as wide as a token's experts, and transformers'.

    python -m benchmarks.moe [--rounds 9]

Forward and backward of one feed-forward layer over 2,048 tokens of width 256 in fp32, with one thread. The layers take
turns, round by round; a figure is the median of the rounds' ratios, with quartiles. transformers' block of Mixtral runs
in both of its ways, a loop over experts and grouped products. Then the same layer on two gloo
ranks, with all experts on both and with half of them on each, and what a layer keeps for backward.
"""

from __future__ import annotations

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from benchmarks.cpu_step import Step, measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.model.layer_kinds import make_mlp, make_moe
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout

PORT = 29521
TOKENS, HIDDEN = 2048, 256
FEW, MANY = (8, 688, 2), (32, 256, 4)
"""Number of experts, their width, and how many of them a token uses."""


def config(experts: int | None, width: int, topk: int, dispatcher: str = "alltoall") -> ModelConfig:
    options = {"num_experts": experts, "moe_router_topk": topk} if experts is not None else {}
    return ModelConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=width,
        swiglu=True,
        add_bias_linear=False,
        moe_token_dispatcher_type=dispatcher,  # type: ignore[arg-type]
        **options,
    )


def layer_step(model: ModelConfig, mesh: ParallelMesh) -> Step:
    """Forward and backward of a layer of this model."""
    make = make_mlp if model.num_experts is None else make_moe
    layer: nn.Module = make(model, ParallelContext(mesh), 0)
    initialize(layer, 1)
    layout = SequenceLayout.whole(TOKENS)
    context = LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(mesh.rank), requires_grad=True)
    gradient = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(2))

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        hidden.grad = None
        output, _ = layer(hidden, context)
        output.backward(gradient)
        return output.detach().norm()

    return step


def mixtral_step(experts: int, width: int, topk: int, way: str) -> Step:
    """The same of transformers' block, with one of its ways of running experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=width,
        num_local_experts=experts,
        num_experts_per_tok=topk,
        experts_implementation=way,
    )
    block = MixtralSparseMoeBlock(sizes)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gradient = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))

    def step() -> Tensor:
        block.zero_grad(set_to_none=True)
        hidden.grad = None
        output = block(hidden)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(gradient)
        return output.detach().norm()

    return step


def kept(step_of: ModelConfig) -> int:
    """Numbers that a layer keeps for backward, without its input and its parameters."""
    layer = make_moe(step_of, ParallelContext(ParallelMesh()), 0)
    initialize(layer, 1)
    layout = SequenceLayout.whole(TOKENS)
    hidden = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = layer(hidden, LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs))
    storages.pop(hidden.untyped_storage().data_ptr(), None)
    assert output.requires_grad
    return sum(storages.values()) // 4


def on_two_ranks(rank: int, rounds: int, answers: multiprocessing.Queue[dict[str, list[float]]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=2)
    meshes = {size: ParallelMesh(rank=rank, world_size=2, expert_parallel_size=size) for size in (1, 2)}
    steps = {"EP 1": layer_step(config(*FEW), meshes[1])}
    for dispatcher in ("alltoall", "allgather"):
        steps[f"EP 2 {dispatcher}"] = layer_step(config(*FEW, dispatcher), meshes[2])
    times = measure(steps, rounds, meshes[1])
    if rank == 0:
        answers.put(times)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {rounds} rounds, median [quartiles] of CPU time")
    mesh, found = ParallelMesh(), {}
    for experts, width, topk in (FEW, MANY):
        name = f"{experts} experts of {width}, top-{topk}"
        steps = {
            name: layer_step(config(experts, width, topk), mesh),
            "dense": layer_step(config(None, width * topk, topk), mesh),
            **{f"Mixtral, {way}": mixtral_step(experts, width, topk, way) for way in ("eager", "grouped_mm")},
        }
        times = measure(steps, rounds, mesh)
        for rival in list(steps)[1:]:
            found[f"{name} / {rival}"] = of = ratios(times, name, rival)
            print(f"  {name} / {rival:20} {quartiles(of)}")
        numbers = kept(config(experts, width, topk)) / (topk * TOKENS * (HIDDEN + 2 * width))
        found[f"{name}: kept"] = numbers
        print(f"  {name}: keeps {numbers:.3f} x topk x tokens x (hidden + 2 x width) numbers")
    queue: multiprocessing.Queue[dict[str, list[float]]] = multiprocessing.get_context("spawn").Queue()
    multiprocessing.spawn(functools.partial(on_two_ranks, rounds=rounds, answers=queue), nprocs=2)
    times = queue.get()
    for dispatcher in ("alltoall", "allgather"):
        found[f"EP 2 {dispatcher} / EP 1"] = of = ratios(times, f"EP 2 {dispatcher}", "EP 1")
        print(f"  EP 2 {dispatcher} / EP 1 {quartiles(of)}")
    write_results("moe", {"ratios": found})


if __name__ == "__main__":
    main()
