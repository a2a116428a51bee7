"""Mamba-2, gated delta net, Kimi delta attention against layers of transformers on a CPU: time, precision, ranks.

    python -m benchmarks.recurrent_layers [--rounds 9] [--only layers precision ranks]

- layers: forward and backward of a layer over 4,096 tokens in fp32, hidden 256, against the torch path of transformers'
  layer with the same weights, in turn; process CPU time at one thread, median of the ratios with quartiles.
- precision: the distance of a bf16 layer's output and gradients from those of a float64 layer with the same (rounded)
  weights over 4,096 tokens, and that of transformers' layer from its own in fp32, which computes its recurrence in fp32
  whatever the dtype is.
- ranks: a layer under context parallelism, 2 and 4 ranks, by a scan and by a chain, against one: CPU time of all ranks
  together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cpu_step import Step, measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.model.batch import LayerContext
from megalite.model.gated_delta import GatedDelta, GatedDeltaSizes
from megalite.model.kimi_delta import KimiDelta, KimiDeltaSizes
from megalite.model.mamba import Mamba, MambaSizes
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, zigzag

HIDDEN, TOKENS = 256, 4096
KINDS = ("mamba", "gated_delta", "kimi_delta")
SCAN = AttentionWay()
WAYS = {"scan": SCAN, "chain": AttentionWay(chains=True)}
TARGETS = {"layers": 0.6, "ranks 2": 1.1, "ranks 4": 1.2}


def own_layer(kind: str, dtype: torch.dtype, mesh: ParallelMesh | None = None, way: AttentionWay = SCAN) -> nn.Module:
    """Return a layer with initial weights."""
    context = ParallelContext(mesh or ParallelMesh(), dtype=dtype, attention_ways=(way,))
    layer: nn.Module
    if kind == "mamba":
        layer = Mamba(context, "mamba", MambaSizes(HIDDEN, heads=8, groups=2, width=64, state=64))
    elif kind == "kimi_delta":
        layer = KimiDelta(context, "kimi_delta", KimiDeltaSizes(HIDDEN, heads=4, width=64))
    else:
        sizes = GatedDeltaSizes(HIDDEN, key_heads=2, heads=4, key_width=64, value_width=64)
        layer = GatedDelta(context, "gated_delta", sizes)
    initialize(layer, seed=1)
    return layer


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return the layer's weights by the last part of their logical names."""
    return {
        piece.tensor.name.split(".", 1)[1]: piece.view(parameter).detach() for parameter, piece in named_pieces(layer)
    }


def twin(kind: str, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return transformers' layer with these weights."""
    if kind == "kimi_delta":
        return kimi_twin(weights)
    layer = _mamba_twin() if kind == "mamba" else _delta_twin()
    flat = {name: value.flatten(0, -2) if value.dim() > 1 else value for name, value in weights.items()}
    with torch.no_grad():
        if kind == "mamba":
            layer.in_proj.weight.copy_(torch.cat([flat[name] for name in ("z", "x", "B", "C", "dt")]))
            taps = torch.cat([flat[f"conv_{name}"] for name in ("x", "B", "C")])
            layer.conv1d.bias.copy_(torch.cat([weights[f"conv_{name}_bias"].flatten() for name in ("x", "B", "C")]))
            layer.D.copy_(weights["D"])
        else:
            groups = [weights[name].unflatten(0, (2, -1)).flatten(1, -2) for name in ("query", "key", "value", "z")]
            layer.in_proj_qkvz.weight.copy_(torch.cat(groups, 1).flatten(0, 1))
            groups = [weights[name].unflatten(0, (2, -1)) for name in ("beta", "alpha")]
            layer.in_proj_ba.weight.copy_(torch.cat(groups, 1).flatten(0, 1))
            taps = torch.cat([flat[f"conv_{name}"] for name in ("query", "key", "value")])
        layer.conv1d.weight.copy_(taps.unsqueeze(1))
        layer.norm.weight.copy_(weights["norm.weight"].flatten())
        layer.dt_bias.copy_(weights["dt_bias"])
        layer.A_log.copy_(weights["A_log"])
        layer.out_proj.weight.copy_(weights["output"].flatten(1))
    return layer


def _mamba_twin() -> Any:
    from transformers.models.bamba.modeling_bamba import BambaConfig, BambaMixer

    config = BambaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        attn_layer_indices=[],
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=2,
        mamba_d_state=64,
        mamba_expand=2,
        mamba_chunk_size=128,
    )
    return BambaMixer(config, 0)


def _delta_twin() -> Any:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    return Qwen3NextGatedDeltaNet(config, 0)


def kimi_twin(weights: Mapping[str, Tensor], bound: float | None = None) -> nn.Module:
    """Return transformers' Kimi delta attention with these weights; with a bound, its decays are those of GLM-5.3."""
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearConfig, KimiLinearDeltaAttention

    heads, width, hidden = weights["query"].shape
    sizes = {"hidden_size": hidden, "linear_num_heads": heads, "linear_head_dim": width}
    config: Any = KimiLinearConfig(num_hidden_layers=1, rms_norm_eps=1e-5, **sizes)
    layer = KimiLinearDeltaAttention(config, 0)
    if bound is not None:
        config.linear_lower_bound = bound
        layer.forget_gate = Glm5NextTextForgetGate(config)
    flat = {name: value.flatten(0, -2) if value.dim() > 1 else value for name, value in weights.items()}
    names = {"q": "query", "k": "key", "v": "value", "b": "beta", "g_a": "gate_a", "g_b": "gate_b"}
    parts = {f"{theirs}_proj.weight": flat[ours] for theirs, ours in names.items()}
    parts |= {f"forget_gate.f_{part}_proj.weight": flat[f"decay_{part}"] for part in "ab"}
    parts["forget_gate.dt_bias"] = weights["dt_bias"].flatten()
    parts["forget_gate.A_log"] = weights["A_log"].view(layer.forget_gate.A_log.shape)
    parts["conv1d.weight"] = torch.cat([flat[f"conv_{part}"] for part in ("query", "key", "value")]).unsqueeze(1)
    parts |= {"o_norm.weight": weights["norm.weight"], "o_proj.weight": weights["output"].flatten(1)}
    layer.load_state_dict(parts)
    return layer


def context_of(mesh: ParallelMesh) -> LayerContext:
    layout = SequenceLayout.cut(TOKENS, zigzag(mesh.size("cp")), mesh.coordinate("cp"))
    return LayerContext(None, None, {}, RandomKey(0, (0,)), layout, layout.runs)


def own_step(kind: str, mesh: ParallelMesh, way: AttentionWay = SCAN) -> Step:
    """Return forward and backward of a layer over this rank's tokens."""
    layer, context = own_layer(kind, torch.float32, mesh, way), context_of(mesh)
    whole = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    hidden = context.layout.own(whole, 0).requires_grad_()
    gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    return lambda: layer(hidden, context).backward(gradient)


def twin_step(kind: str) -> Step:
    """Return forward and backward of transformers' layer over as many tokens."""
    layer = twin(kind, tensors_of(own_layer(kind, torch.float32)))
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    return lambda: layer(hidden).backward(gradient)


def distances(kind: str) -> dict[str, float]:
    """Return how far bf16 layers are from wide ones, relative to the norm: output and gradient of the input."""
    narrow = own_layer(kind, torch.bfloat16)
    weights = tensors_of(narrow)
    wide = own_layer(kind, torch.float64)
    with torch.no_grad():
        for name, value in tensors_of(wide).items():
            value.copy_(weights[name])
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    context = context_of(ParallelMesh())

    def of(layer: Callable[..., Tensor], dtype: torch.dtype, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return the output and the gradient of the input in float64, tokens first."""
        turned = hidden if arguments else hidden.transpose(0, 1)
        input = turned.to(dtype, copy=True).requires_grad_()
        output = layer(input, *arguments)
        output.backward((gradient if arguments else gradient.transpose(0, 1)).to(dtype))
        assert input.grad is not None
        found = output.detach().double(), input.grad.double()
        return found if arguments else (found[0].transpose(0, 1), found[1].transpose(0, 1))

    truth, own = of(wide, torch.float64, context), of(narrow, torch.bfloat16, context)
    # Its parameters in bf16, as transformers loads them; A_log and dt_bias are then rounded, too.
    theirs = of(twin(kind, weights).bfloat16(), torch.bfloat16)
    found = {}
    for what, right, ours, other in zip(("output", "input gradient"), truth, own, theirs, strict=True):
        found[f"{what}, own"] = ((ours - right).norm() / right.norm()).item()
        found[f"{what}, transformers"] = ((other - right).norm() / right.norm()).item()
    return found


def _ranks(rank: int, size: int, port: int, rounds: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    mesh = ParallelMesh(rank=rank, world_size=size, context_parallel_size=size)
    found = {}
    for kind in KINDS:
        steps = {"one": own_step(kind, ParallelMesh())}
        steps |= {name: own_step(kind, mesh, way) for name, way in WAYS.items()}
        times = measure(steps, rounds, mesh)
        times["one"] = [seconds / size for seconds in times["one"]]  # all ranks ran one
        found |= {f"{kind}, {name}": ratios(times, name, "one") for name in WAYS}
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def over_ranks(size: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU time of all ranks over that of one, by kind of layer and round."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    spawning = multiprocessing.get_context("spawn")
    answers = spawning.Queue()
    ranks = [spawning.Process(target=_ranks, args=(rank, size, port, rounds, answers)) for rank in range(size)]
    for process in ranks:
        process.start()
    found: dict[str, list[float]] = answers.get()
    for process in ranks:
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=("layers", "precision", "ranks"))
    options = parser.parse_args()
    chosen = options.only or ("layers", "precision", "ranks")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for kind in KINDS if "layers" in chosen else ():
        steps = {"own": own_step(kind, ParallelMesh()), "transformers": twin_step(kind)}
        times = measure(steps, options.rounds, ParallelMesh())
        figures[f"layers, {kind}"] = found = ratios(times, "own", "transformers")
        print(f"{kind}: {quartiles(found)} of transformers' time (at most {TARGETS['layers']})")
        print(f"  {1e6 * statistics.median(times['own']) / TOKENS:.1f} µs a token")
    for kind in KINDS if "precision" in chosen else ():
        figures[f"precision, {kind}"] = distances(kind)
        for what, distance in figures[f"precision, {kind}"].items():
            print(f"{kind}, {what}: {distance:.2e} from float64")
    for size in (2, 4) if "ranks" in chosen else ():
        for kind, found in over_ranks(size, options.rounds).items():
            figures[f"ranks {size}, {kind}"] = found
            print(f"{kind}, {size} ranks: {quartiles(found)} of one rank's (at most {TARGETS[f'ranks {size}']})")
    write_results("recurrent_layers", figures)


if __name__ == "__main__":
    main()
