"""Published runs: each row of published_runs.csv as a configuration, or the reason why it is none.

What a row leaves out is either known of its program (`STACKS`) or assumed, and then named in `Run.assumed`.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.planner.programs import PROGRAMS, Program, program_of
from megalite.config import RunConfig
from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.training import TrainingConfig
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import Cluster, Link, Stack, find_cluster, find_stack

FILE = Path(__file__).with_name("published_runs.csv")
_GPUS = {
    "A100-SXM": "A100-SXM-40GB",  # of 2020: only that memory was sold
    "H100-96GB-HBM2e-500W": "H100-96GB",
    "V100-32GB(DGX-2)": "V100-SXM-32GB",
    "A800-80GB": "A100-SXM-80GB",
}
_NETWORKS = {  # seconds per byte and GPU
    "vTrain": 90e-12,  # 800 Gb/s per node of 8
    "bigscience": 90e-12,  # Omni-Path, 4 x 100 Gb/s per node of 8
    "InternEvo": 90e-12,  # RoCE, 4 x 100 Gb/s per node of 8
    "Zero Bubble": 90e-12,  # RoCE; its speed is not stated
    "JAX-Toolbox": 42e-12,
}
_LATENT = re.compile(r"kimi|deepseek.?(v[23]|r1)", re.IGNORECASE)
"""Models with latent attention, by their names."""
_LARGER = 1.3
"""Experts that would make a model larger by this factor than it is do not have the width of the row."""
_MICRO_BATCHES_PER_STAGE = 6
"""Micro-batches of a pipeline per stage that runs leave whose micro-batch is not published."""


@dataclass(frozen=True)
class Run:
    """Row of the table as a configuration."""

    number: int
    row: Mapping[str, str]
    config: RunConfig
    world_size: int
    cluster: Cluster
    program: str
    seconds: float | None
    """Measured seconds of a step."""
    memory: float | None
    """Measured GB of memory."""
    assumed: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def stack(self) -> Stack:
        """The program, with the dtype of this row's products."""
        stack = find_stack(self.program)
        precision = self.row["precision"]
        if "fp8" in precision:
            return replace(stack, low_precision="float8")
        return replace(stack, low_precision="float4") if "fp4" in precision else stack


def rows() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def published() -> tuple[tuple[Run, ...], dict[int, str]]:
    """Return all runs, and the reason for each row that is none, by its number in the table."""
    found, reasons = [], {}
    for number, row in enumerate(rows()):
        try:
            found.append(_run(number, row))
        except (ValueError, ConfigurationError) as error:
            reasons[number] = str(error)
    return tuple(found), reasons


def _run(number: int, row: Mapping[str, str]) -> Run:
    if not row["layers"]:
        raise ValueError("the sizes of its layers are not published")
    if not row["tp"]:
        raise ValueError("its layout is not published")
    if _LATENT.search(row["model"]):
        raise ValueError("latent attention, which megalite does not have")
    if row["schedule"].startswith("ZB"):
        raise ValueError("a schedule of the zero-bubble paper that megalite does not have (ZB-1p and ZB-2p)")
    assumed: list[str] = []
    name = program_of(row)
    program = PROGRAMS[name]
    gpus = int(row["n_gpus"])
    parallel = _parallel(row, program)
    model = _model(row)
    micro_batch = _micro_batch(row, assumed)
    if gpus % parallel.model_parallel_size:
        raise ValueError(f"its layout does not divide its {gpus} GPUs")
    data_ranks = parallel.data_parallel_size(gpus)
    batch = int(float(row["global_batch"] or 0)) or micro_batch * data_ranks
    if batch < micro_batch * data_ranks or (row["dp"] and float(row["dp"]) != data_ranks):
        raise ValueError("its sizes contradict each other: batch, micro-batch, data-parallel ranks")
    training = _training(row, program, micro_batch, batch, assumed)
    parallel = _pipeline(row, parallel, model)
    config = RunConfig(
        model=model,
        data=DataConfig(seq_length=int(row["seq"])),
        optimizer=OptimizerConfig(lr=1e-4),
        training=training,
        parallel=parallel,
        kernels=program.kernels,
    )
    return Run(
        number,
        row,
        config,
        gpus,
        _cluster(row),
        name,
        float(row["iter_time_s"]) if row["iter_time_s"] else None,
        float(row["mem_gb"]) if row["mem_gb"] else None,
        tuple(assumed),
    )


def _cluster(row: Mapping[str, str]) -> Cluster:
    cluster = find_cluster(_GPUS.get(row["gpu"], row["gpu"]))
    beta = next((beta for part, beta in _NETWORKS.items() if part in row["source"]), None)
    return cluster if beta is None else replace(cluster, network=Link(cluster.network.alpha, beta))


def _number(row: Mapping[str, str], name: str, default: int = 1) -> int:
    return int(float(row[name])) if row[name] else default


def _model(row: Mapping[str, str]) -> ModelConfig:
    heads, groups = _number(row, "heads"), _number(row, "kv_heads")
    name = row["model"].lower()
    llama = any(word in name for word in ("llama", "qwen", "internlm", "mixtral", "gpt oss"))
    nemotron = "nemotron" in name
    experts: dict[str, Any] = {}
    if row["experts"]:
        width, billions = _number(row, "ffn"), float(row["params_b"] or math.inf)
        elements = 3 * _number(row, "layers") * _number(row, "experts") * _number(row, "hidden") * width
        if elements / 1e9 > _LARGER * billions:
            raise ValueError(f"its width of {width} is that of a dense feed-forward, not of an expert")
        experts = {
            "num_experts": _number(row, "experts"),
            "moe_router_topk": _number(row, "topk"),
            "moe_ffn_hidden_size": width,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": ("none",),
        }
    width = {"qwen3": 128, "gpt oss": 64}
    channels = next((size for part, size in width.items() if part in name), None)
    positions = {} if llama or nemotron else {"max_position_embeddings": int(row["seq"])}
    return ModelConfig(
        num_layers=_number(row, "layers"),
        hidden_size=_number(row, "hidden"),
        num_attention_heads=heads,
        kv_channels=channels,
        group_query_attention=groups < heads,
        num_query_groups=groups if groups < heads else 1,
        ffn_hidden_size=_number(row, "ffn"),
        vocab_size=_number(row, "vocab"),
        swiglu=llama,
        squared_relu=nemotron,
        normalization="RMSNorm" if llama else "LayerNorm",
        add_bias_linear=not (llama or nemotron or "mpt" in name),
        position_embedding_type="rope" if llama or nemotron else "learned_absolute",
        qk_layernorm="qwen3" in name,
        untie_embeddings_and_output_weights=llama or nemotron,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **experts,
        **positions,
    )


def _micro_batch(row: Mapping[str, str], assumed: list[str]) -> int:
    """Return the micro-batch; where it is missing, the largest that leaves a pipeline few bubbles."""
    if row["micro_batch"]:
        return _number(row, "micro_batch")
    ranks, stages = _number(row, "dp"), _number(row, "pp")
    of_rank = max(_number(row, "global_batch", 1) // ranks, 1)
    enough = _MICRO_BATCHES_PER_STAGE * stages if stages > 1 else 1
    size = max((each for each in (1, 2, 4) if of_rank % each == 0 and of_rank // each >= enough), default=1)
    assumed.append(f"micro-batch {size}")
    return size


def _parallel(row: Mapping[str, str], program: Program) -> ParallelConfig:
    zero = row["zero"]
    stage = 3 if zero in ("3", "fsdp") else 1 if zero.startswith("1") else 0
    strategy = ("no_shard", "optim", "optim_grads", "optim_grads_params")[stage]
    tensor, experts = _number(row, "tp"), _number(row, "ep")
    ranks = _number(row, "dp") * _number(row, "cp")
    instances = max(1, ranks // int("".join(filter(str.isdigit, zero[2:])) or ranks)) if "in-node" in zero else 1
    given = dict(program.parallel)
    if row["precision"] == "fp16" and "grad_reduce_in_bf16" in given and not program.lineage:
        del given["grad_reduce_in_bf16"]
    return ParallelConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=_number(row, "pp"),
        context_parallel_size=_number(row, "cp"),
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=1 if row["experts"] else None,
        sequence_parallel=row["sp"] == "1.0" and tensor > 1,
        data_parallel_sharding_strategy=strategy,
        num_distributed_optimizer_instances=instances,
        **given,
    )


def _pipeline(row: Mapping[str, str], parallel: ParallelConfig, model: ModelConfig) -> ParallelConfig:
    """Return the layout with its stages; uneven ones if the layers cannot be shared evenly."""
    ranks, chunks = parallel.pipeline_model_parallel_size, _number(row, "vpp")
    if ranks == 1:
        return parallel
    if chunks == 1 and row["schedule"] == "interleaved":
        chunks = max((each for each in range(2, 13) if model.num_layers % (each * ranks) == 0), default=1)
    stages = ranks * chunks
    layers = [model.num_layers // stages] * stages
    rest = model.num_layers - sum(layers)
    for index in range(rest):  # the first and the last stage also have the embedding and the head
        layers[1 + index if stages > 2 else index] += 1
    text = "|".join("t" * count for count in layers)
    return replace(parallel, pipeline_model_parallel_layout=f"E{text}L")


def _training(
    row: Mapping[str, str], program: Program, micro_batch: int, batch: int, assumed: list[str]
) -> TrainingConfig:
    recompute: dict[str, Any] = dict(program.training)
    text = row["recompute"]
    if text == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif text.startswith("selective"):
        recompute = {"recompute_granularity": "selective"}
    elif text in ("norm,act", "norm,act,shared_expert"):
        recompute = {}
    elif text != "none":
        assumed.append(f"recomputation {recompute.get('recompute_granularity', 'none')}")
    half = {"fp16": True} if row["precision"] == "fp16" else {"bf16": True}
    return TrainingConfig(
        micro_batch_size=micro_batch,
        global_batch_size=batch - batch % micro_batch if batch > micro_batch else micro_batch,
        train_iters=1,
        **half,
        **recompute,
    )
