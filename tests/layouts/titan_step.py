"""One step of torchtitan 0.3.0 on CPU ranks, recorded. It needs torchtitan and torch, and of megalite the recorder.

    torchrun --nproc-per-node 2 tests/layouts/titan_step.py DIR '{"model": "llama3", "tp": 2, ...}'

It writes DIR/dcp (random weights) and DIR/trace. The flags are those of `draws.py`.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megalite_trace import Recorder

WIDTH, HEADS, HEAD, INNER, VOCABULARY = 64, 4, 16, 96, 256


def network(flags: dict[str, Any]) -> Any:
    """Return the configuration of a network, with attention that CPUs have."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = import_module(f"torchtitan.models.{flags['model']}")
    config = module.model_registry("debugmodel").model
    config.dim, config.vocab_size = WIDTH, VOCABULARY
    config.enable_weight_tying = False
    config.tok_embeddings.num_embeddings, config.tok_embeddings.embedding_dim = VOCABULARY, WIDTH
    config.norm.normalized_shape = config.lm_head.in_features = WIDTH
    config.lm_head.out_features = VOCABULARY
    rope = config.layers[0].attention.rope
    rope.dim, rope.max_seq_len = HEAD, flags["length"]
    sizes: dict[str, Any] = {"n_layers": flags["layers"], "dim": WIDTH, "n_heads": HEADS, "hidden_dim": INNER}
    sizes |= {"n_kv_heads": flags["groups"], "rope": rope, "fuse_qkv": flags["fused"], "attn_backend": "flex"}
    if flags["model"] == "qwen3":
        sizes["head_dim"] = HEAD
    config.layers = getattr(module, f"_build_{flags['model']}_layers")(**sizes)
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def build(flags: dict[str, Any], world: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the network of this rank, and its layout; None on one rank."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    config = network(flags)
    if world == 1:
        return _stored(config.build(), dtype), None
    dist.init_process_group("gloo")
    backend, sp, name = flags["backend"], not flags["no-sp"], flags["model"]
    set_spmd_backend(backend)
    sharding = import_module(f"torchtitan.models.{name}.sharding")
    of_experts = {} if name == "llama3" else {"enable_ep": False}
    getattr(sharding, f"set_{name}_sharding_config")(config, enable_sp=sp, **of_experts)
    how = ParallelismConfig(tensor_parallel_degree=flags["tp"], enable_sequence_parallel=sp, spmd_backend=backend)
    layout = ParallelDims.from_config(how, world)
    layout.build_mesh()
    with torch.device("meta"):
        model = _stored(config.build(), dtype)
    module = import_module(f"torchtitan.models.{name}.parallelize")
    getattr(module, "parallelize_llama" if name == "llama3" else f"parallelize_{name}")(
        model,
        parallel_dims=layout,
        parallelism=how,
        compile_config=CompileConfig(),
        ac_config=None,
        training=TrainingConfig(seq_len=flags["length"], mixed_precision_param=flags["dtype"]),
        dump_folder=".",
    )
    for part in model.modules():  # gloo has not the product by which FSDP2 would divide
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    return model, layout


def _stored(model: Any, dtype: torch.dtype) -> Any:
    """Give a network parameters of a dtype, and leave its tables of rotations as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def main() -> None:
    """Record the step."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined] # torchtitan asks at import
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import full_dtensor
    from torchtitan.distributed.utils import get_spmd_context

    folder, flags = Path(sys.argv[1]), json.loads(sys.argv[2])
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    tp, dp, length = flags["tp"], flags["dp"], flags["length"]
    dtype = getattr(torch, flags["dtype"])
    torch.set_num_threads(1)
    model, layout = build(flags, world, dtype)
    torch.manual_seed(flags["seed"])
    with torch.no_grad():
        model.init_states()
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.1).add_(1.0 if "norm" in name else 0.0)
    state = model.state_dict()
    shape = flags["micro-batches"], flags["samples"], length + 1
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(flags["seed"]))
    coordinates = {"tp": (rank % tp, tp), "dp": (rank // tp, dp)}
    recorder = Recorder(folder / "trace", model, steps={1}, coordinates=coordinates, whole=flags["whole"])
    with recorder.step(1), get_spmd_context(parallel_dims=layout)():
        for batch in tokens:
            mine = batch.chunk(dp)[rank // tp]
            inputs, labels = mine[:, :-1], mine[:, 1:]
            recorder.batch(tokens=inputs, labels=labels)
            positions = torch.arange(length).expand(len(mine), -1)
            if flags["backend"] == "full_dtensor" and layout is not None:
                more = {"positions": positions}
                inputs, labels, more = full_dtensor.parallelize_inputs(layout, inputs, labels, more)
                positions = more["positions"]
            loss = cross_entropy_loss(model(inputs, positions), labels, global_vocab_size=VOCABULARY)
            (loss / tokens[..., 1:].numel()).backward()
        recorder.gradients()
    dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=world == 1)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
