"""Steps of Megatron-LM's own training program, from the wheel megatron-core 0.19.2, recorded on CPU ranks.

What runs is the program's: its flags, initialization, model, data-parallel engine, schedule, optimizer, `train_step`
and recorders. Only what the wheel lacks is written here: the few lines of `pretrain_gpt.py` and `pretrain_hybrid.py`,
and what a GPU would give.

    python -m museum.megatron BUG.py FOLDER [--right]

makes the runs of a case of the museum (`museum/cases.py`) from what BUG.py defines (`museum/entries.py`). FOLDER/run
and FOLDER/reference get command.txt, checkpoint/ (random weights), trace/ (sketches of `megalite_trace.py`),
metrics.jsonl, checkpoint_next/ (weights after the last step) and batch.safetensors (the global batch).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megalite.config import ModelConfig
from megalite.conversion.opened import OpenedModel, logical_tensors
from megalite.data.loader import MicroBatchArrays
from megalite.extras.verify.batches import StepBatches
from megalite.extras.verify.command import Command, read_command
from megalite.extras.verify.trace import LAST, Trace
from megalite_trace import Recorder
from tests.harness import megatron_hybrid
from tests.harness.megatron_core import NORMS_OF_LATENTS, write_in_this_process
from tests.harness.rank_pool import RankPools
from tests.unit.test_conversion_megatron import Weights, write

FLAGS = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --mock-data "
    "--train-iters 4 --lr 1e-3 --min-lr 1e-3 --distributed-backend gloo --disable-gloo-process-groups"
)
"""Flags of all commands: what only GPUs and other packages can do is off."""
_WHOLE_GRADIENTS = ("--save-wgrads-interval", "1")
"""Flags without which the distributed optimizer leaves each rank the sum of its own shard alone."""
_LOGS = ("--save-activations-interval", "1", "--save-dgrads-interval", "1", "--save-params-interval", "1")
How = Literal["logs", "whole", "sketches"]
"""Recorder: the program itself, or `megalite_trace.py`."""
Within = Callable[[], AbstractContextManager[Any]]
"""Function whose context the model is built and the step runs in, such as one that plants a bug."""
_LAYOUT = re.compile(
    r"--(sequence-parallel|use-distributed-optimizer|overlap-\S+|(\S+-parallel-(size|layout)|cp-comm-type|"
    r"num-layers-per-virtual-pipeline-stage|num-distributed-optimizer-instances) \S+)(?!\S)"
)
"""Flags that the same model on one rank does without."""


@dataclass(frozen=True)
class Run:
    """First steps of a command from random weights, each on the same random batch.

    Attributes:
        flags: the command's flags, beside `FLAGS`.
        folder: where everything of it is written.
        masked: whether about two in five labels count in no loss.
        seed: of the weights and the batch.
    """

    flags: str
    ranks: int
    folder: Path
    masked: bool = False
    seed: int = 0
    steps: int = 1

    @property
    def arguments(self) -> list[str]:
        return shlex.split(f"{FLAGS} {self.flags}")

    @property
    def text(self) -> str:
        """The command."""
        program = "pretrain_hybrid.py" if "--hybrid-layer-pattern" in self.flags else "pretrain_gpt.py"
        return f"torchrun --nproc-per-node {self.ranks} {program} {shlex.join(self.arguments)}"

    def command(self) -> Command:
        return read_command(self.text)

    def prepare(self) -> Path:
        """Write the command, the batch and the weights, and return the folder of the weights."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "command.txt").write_text(f"{self.text}\n")
        save_file(self.batch(), self.folder / "batch.safetensors")
        config, size = self.command().config, self.command().sizes["tp"]
        model = replace(config.model, vocab_size=config.model.padded_vocab_size(size))
        opened = self._random(model, torch.bfloat16 if config.training.bf16 else torch.float32)
        return write(opened, self.folder / "checkpoint", tensor_parallel_size=size)

    def _random(self, model: ModelConfig, dtype: torch.dtype) -> OpenedModel:
        """Return a network of which nothing is at its initial value, so that no mistake hides."""
        generator = torch.Generator().manual_seed(self.seed)
        weights = {}
        for name, shape in logical_tensors(model).items():
            weights[name] = torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        source = Weights({name: values.to(dtype) for name, values in weights.items()})
        return OpenedModel("random", model, source, {}, self.command().config.data.seq_length)

    def batch(self) -> dict[str, Tensor]:
        """Return tokens, labels and loss_mask of the global batch, [samples, sequence] each."""
        config = self.command().config
        size, length = config.training.global_batch_size, config.data.seq_length
        assert size is not None
        assert length is not None
        assert config.model.vocab_size is not None
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(config.model.vocab_size, (size, length + 1), generator=generator)
        mask = torch.rand(size, length, generator=generator) < (0.6 if self.masked else 2.0)
        return {"tokens": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone(), "loss_mask": mask.float()}

    def record(self, pools: RankPools, weights: Path, how: How = "logs", within: Within = nullcontext) -> Path:
        """Run the steps on its ranks, and return the folder of its trace."""
        folder = self.folder / how
        arguments = [*self.arguments, "--save", str(folder), "--save-interval", "100"]
        pools(self.ranks).run(train, arguments, weights, self.batch(), folder, how, within, self.steps)
        return folder

    def batches(self, trace: Trace) -> StepBatches:
        """Return the micro-batches of the step, for traces without them."""
        command = self.command()
        size, replicas = command.config.training.micro_batch_size, command.sizes["dp"]
        parts = {name: values.split(size) for name, values in self.batch().items()}
        per_rank = len(parts["tokens"]) // replicas
        order = [at * replicas + replica for replica in range(replicas) for at in range(per_rank)]
        arrays = tuple(_arrays({name: each[at] for name, each in parts.items()}, at * size) for at in order)
        numbers: dict[tuple[int, int], int] = {}
        for rank, axes in trace.coordinates.items():
            first = axes.get("dp", (0, 1))[0] * per_rank
            numbers |= {(rank, at): first + at for at in range(per_rank)} | {(rank, LAST): first + per_rank - 1}
        return StepBatches(arrays, numbers, per_rank, replicas, whole=True)


def _arrays(parts: Mapping[str, Tensor], first: int) -> MicroBatchArrays:
    tokens = parts["tokens"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return MicroBatchArrays(
        tokens=tokens.numpy(),
        labels=parts["labels"].numpy(),
        loss_mask=parts["loss_mask"].double().numpy(),
        positions=positions.contiguous().numpy(),
        document_ids=None,
        padding=None,
        sample_ids=range(first, first + len(tokens)),
        replayed=None,
    )


# ------------------------------------------------------------------------------------------------ on a rank


def train(
    arguments: Sequence[str],
    weights: Path,
    batch: Mapping[str, Tensor],
    folder: Path,
    how: How,
    within: Within,
    steps: int,
) -> None:
    """Run the first steps of a command on this rank, and record them in a folder.

    Beside it are written metrics.jsonl and checkpoint_next/, the weights after the last step.

    Args:
        arguments: the flags with which the program starts.
        weights: folder of a checkpoint in the form torch_dist.
        batch: the global batch, as `Run.batch` returns it.
    """
    flags = [*arguments, *_WHOLE_GRADIENTS, *(_LOGS if how == "logs" else ())]
    with _program(flags) as args, within():
        from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.utils import get_model_config
        from megatron.training import training

        model = training.get_model(_network)
        optimizer = _optimizer(model, args)
        _load(model, weights)
        if args.bf16:
            optimizer.reload_model_params()  # as the program does when it loads weights alone
        scheduler = training.get_optimizer_param_scheduler(optimizer)
        recorder = Recorder(
            folder,
            model,
            steps=range(1, steps + 1) if how != "logs" else (),
            program="megatron",
            whole=how == "whole",
            coordinates=_coordinates(),
        )
        if how != "logs":
            optimizer.step = _after(recorder.gradients, optimizer.step)
        config = get_model_config(model[0])
        config.grad_scale_func = optimizer.scale_loss  # as `train` does
        config.finalize_model_grads_func = training.finalize_model_grads
        rows = []
        for number in range(1, steps + 1):
            rate = get_canonical_lr_for_logging(optimizer.param_groups)
            with recorder.step(number):
                losses, skipped, *_, norm, _, _ = training.train_step(
                    partial(_forward_step, recorder=recorder),
                    _iterators(batch, args),
                    model,
                    optimizer,
                    scheduler,
                    config,
                    get_forward_backward_func(),
                    iteration=number - 1,
                )
                assert not skipped
                figures = {"grad_norm": float(norm), "learning_rate": rate}
                if losses:  # on the last pipeline stage
                    figures["loss"] = float(losses["lm loss"])
                recorder.figures(**figures)
            rows.append({"step": number, **figures})
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # which prints them
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            (folder.parent / "metrics.jsonl").write_text(text)
        _save(model, args, folder.parent / "checkpoint_next")


def _after(first: Callable[[], None], function: Callable[[], Any]) -> Callable[[], Any]:
    def both() -> Any:
        first()
        return function()

    return both


def _coordinates() -> dict[str, tuple[int, int]]:
    """Return this rank's place on each axis."""
    from megatron.core import parallel_state

    names = {
        "tp": "tensor_model_parallel",
        "pp": "pipeline_model_parallel",
        "cp": "context_parallel",
        "dp": "data_parallel",
        "ep": "expert_model_parallel",
        "etp": "expert_tensor_parallel",
        "edp": "expert_data_parallel",
    }
    of = {axis: (f"get_{name}_rank", f"get_{name}_world_size") for axis, name in names.items()}
    return {
        axis: (getattr(parallel_state, rank)(), getattr(parallel_state, size)()) for axis, (rank, size) in of.items()
    }


# ------------------------------------------------------------------------------------------------ pretrain_gpt.py


def _network(pre_process: bool, post_process: bool, vp_stage: int | None = None, **_: Any) -> Any:
    """Build a chunk of the network, as `pretrain_gpt.py` and `pretrain_hybrid.py` do, without Transformer Engine."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    options = {
        "config": core_transformer_config_from_args(args),
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "vp_stage": vp_stage,
    }
    return _hybrid(args, options) if args.hybrid_layer_pattern else _gpt(args, options)


def _hybrid(args: Any, options: Mapping[str, Any]) -> Any:
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm
    options["config"].deterministic_mode = True  # the gated delta rule in PyTorch
    return HybridModel(
        hybrid_stack_spec=megatron_hybrid.stack(True, args), hybrid_layer_pattern=args.hybrid_layer_pattern, **options
    )


def _gpt(args: Any, options: Mapping[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoELayer

    config, vp_stage = options["config"], options["vp_stage"]
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        names = layer.submodules.sharded_state_dict_keys_map  # of norms: as those of Transformer Engine's
        if args.multi_latent_attention:
            names |= NORMS_OF_LATENTS | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        if layer.submodules.mlp.func is MoELayer:
            names.pop("pre_mlp_layernorm.", None)
        attention = layer.submodules.self_attention.submodules
        if args.multi_latent_attention or args.context_parallel_size > 1:
            attention.core_attention = _Core
        if args.multi_latent_attention and args.q_lora_rank is None:
            attention.q_layernorm = IdentityOp
    return GPTModel(transformer_layer_spec=spec, rope_scaling=args.use_rope_scaling, **options)


def _iterators(batch: Mapping[str, Tensor], args: Any) -> Any:
    """Return the micro-batches of this rank, once for each chunk if there are several."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import RerunDataIterator

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    parts = {name: values.split(args.micro_batch_size)[rank::ranks] for name, values in batch.items()}
    micro_batches = [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]
    chunks = args.virtual_pipeline_model_parallel_size
    iterators = [RerunDataIterator(iter(micro_batches)) for _ in range(chunks or 1)]
    return iterators[0] if chunks is None else iterators


def _forward_step(iterator: Any, model: Any, recorder: Recorder) -> tuple[Tensor, Callable[[Tensor], Any]]:
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

    batch = dict(next(iterator))
    length = batch["tokens"].shape[1]
    batch["positions"] = torch.arange(length).expand_as(batch["tokens"])
    batch["attention_mask"] = torch.ones(1, 1, length, length).tril() < 0.5
    batch = get_batch_on_this_cp_rank(batch, False, parallel_state.get_context_parallel_group())
    hidden = batch.pop("attention_mask")
    if not get_attr_wrapped_model(model, "vp_stage", allow_none=True):  # each chunk gets the same ones
        recorder.batch(**batch)
    mask = batch["loss_mask"]
    output = model(batch["tokens"], batch["positions"], hidden, labels=batch["labels"], loss_mask=mask)
    return output, partial(_loss, mask)


def _loss(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    mask = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    count = mask.sum().clone().detach().to(torch.int)
    return loss, count, {"lm loss": torch.cat([loss.clone().detach().view(1), count.view(1)])}


# ------------------------------------------------------------------------------------------------ the program


@contextlib.contextmanager
def _program(flags: Sequence[str]) -> Iterator[Any]:
    """Initialize the program on this rank, and forget everything of it in the end."""
    world = {"RANK": torch.distributed.get_rank(), "WORLD_SIZE": torch.distributed.get_world_size()}
    environment = {name: str(value) for name, value in world.items()} | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(None))
        megatron_hybrid.stand_in()
        from megatron.core import tensor_parallel
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_logging, moe_utils, token_dispatcher
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.training import activation_logging, dgrad_logging, initialize, training
        from megatron.training.arguments import parse_and_validate_args

        stack.enter_context(_as_on_a_gpu())
        stack.enter_context(mock.patch.object(WrappedTorchNorm, "__new__", _norm))
        for logging in (activation_logging, dgrad_logging):  # which record Transformer Engine's norms, too
            kinds = (each for each in logging.LINEAR_TYPES if isinstance(each, type))
            stack.enter_context(mock.patch.object(logging, "LINEAR_TYPES", (*kinds, nn.LayerNorm, nn.RMSNorm)))
            stack.enter_context(mock.patch.object(logging, "_LOGGER", None))
        losses = tensor_parallel.vocab_parallel_cross_entropy  # in fp32 it overwrites what hooks keep
        kept: Callable[..., Tensor] = lambda logits, *more, **named: losses(logits.clone(), *more, **named)  # noqa: E731
        stack.enter_context(mock.patch.object(tensor_parallel, "vocab_parallel_cross_entropy", kept))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _as_list))
        stack.enter_context(mock.patch.object(multi_latent_attention, "HAVE_TE", False))
        offloaded = partialmethod(_offloaded, HybridDeviceOptimizer._get_sub_optimizer_param_groups)
        stack.enter_context(mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", offloaded))
        stack.enter_context(mock.patch.object(initialize, "_compile_dependencies"))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiling would take ten seconds
        stack.enter_context(mock.patch.object(sys, "argv", ["pretrain_gpt.py", *flags]))
        stack.callback(training.destroy_global_state)
        stack.callback(moe_logging.destroy_moe_metrics_tracker)
        args = parse_and_validate_args()
        initialize.initialize_megatron(allow_no_cuda=True, skip_random_seed=True)
        yield args


def _optimizer(model: Any, args: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training.training import get_megatron_optimizer_config

    config, overrides = get_megatron_optimizer_config(args)
    return get_megatron_optimizer(
        config, model, config_overrides=overrides, use_gloo_process_groups=args.use_gloo_process_groups
    )


def _load(model: Sequence[Any], weights: Path) -> None:
    """Load the weights of a checkpoint, all of which the network must use."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    chunks = unwrap_model(model)
    states: dict[str, Any] = {}
    for at, chunk in enumerate(chunks):
        parts = chunk.sharded_state_dict().items()
        states[str(at)] = {name: part for name, part in parts if "_extra_state" not in name}
    loaded = dist_checkpointing.load(states, str(weights), strict="raise_unexpected")
    for at, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[str(at)], strict=False)


def _save(model: Sequence[Any], args: Any, folder: Path) -> None:
    """Write the weights as a checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    write_in_this_process()
    folder.mkdir(exist_ok=True)
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 1}
    for at, chunk in enumerate(unwrap_model(model)):
        state[f"model{at}"] = chunk.sharded_state_dict()
    dist_checkpointing.save(state, str(folder))


class _LayerNorm(nn.LayerNorm):
    """Norm that computes in fp32, as those of Transformer Engine and apex: torch's adds gradients in bf16 on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        shape, weight, bias = self.normalized_shape, self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), shape, weight, bias, self.eps).to(input.dtype)


class _RMSNorm(nn.RMSNorm):
    """Norm that computes in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input.float(), self.normalized_shape, self.weight.float(), self.eps).to(input.dtype)


def _norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> nn.Module:
    """Return a norm with the mark of Transformer Engine's and apex's for sequence parallelism."""
    norm = {"LayerNorm": _LayerNorm, "RMSNorm": _RMSNorm}[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


class _Core(nn.Module):
    """Causal attention over the tokens of all context-parallel ranks, with values of another width than keys.

    Megatron-LM has both in Transformer Engine alone.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        rank, ranks = group.rank(), group.size()
        chunks = torch.arange(len(query) * ranks).chunk(2 * ranks)
        places = [torch.cat([chunks[at], chunks[2 * ranks - 1 - at]]) for at in range(ranks)]
        seen = torch.cat(places) <= places[rank].unsqueeze(1)
        queries, keys, values = (
            each.permute(1, 2, 0, 3) for each in (query, *(_Gathered.apply(each, group) for each in (key, value)))
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, seen, scale=self.scale, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class _Gathered(torch.autograd.Function):
    """Concatenates the parts of all ranks along the first dimension."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


# ------------------------------------------------------------------------------------------------ instead of a GPU


def _as_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return counts as the program has them after it has moved them from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _offloaded(self: Any, divide: Callable[[Any, float], tuple[Any, ...]], fraction: float) -> tuple[Any, ...]:
    """Return the groups of an optimizer that keeps its weights on the CPU, with the places that it has on a GPU."""
    on_cpu, on_gpu, _, _, copies = divide(self, fraction)
    return on_cpu, on_gpu, copies, {copy: weight for weight, copy in copies.items()}, copies


class _Stream:
    """Stream or event of a GPU, on which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Stream()


class _Properties:
    major, minor, multi_processor_count = 8, 0, 1


class _Tracker:
    """Random states of a GPU, of which nothing is drawn without dropout."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def is_initialized(self) -> bool:
        return True


class _OnCpu(TorchFunctionMode):
    """Gives the CPU to code that asks for a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if function is Tensor.cuda:
            return args[0]
        if function is Tensor.cpu:
            return args[0].clone()  # it is a copy of a tensor on a GPU
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if function is Tensor.to:
            args = [torch.device("cpu") if _is_gpu(each) else each for each in args]
        found = function(*args, **kwargs)
        if function is Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


def _is_gpu(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Let code that needs one GPU for each rank run on the CPU."""
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    names = "synchronize empty_cache set_device check_error reset_peak_memory_stats"
    with ExitStack() as stack:
        for name in names.split():
            stack.enter_context(mock.patch.object(torch.cuda, name, nothing))
        for name, value in {
            "device_count": lambda: 1,
            "current_device": lambda: torch.device("cpu"),
            "get_device_properties": lambda *_: _Properties,
            "get_device_capability": lambda *_: (8, 0),
            "Stream": _Stream,
            "Event": _Stream,
            "current_stream": _Stream,
            "default_stream": _Stream,
            "stream": lambda *_: nullcontext(),
            "get_rng_state": lambda *_: torch.get_rng_state(),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        from megatron.core.tensor_parallel import random

        stack.enter_context(mock.patch.object(random, "_CUDA_RNG_STATE_TRACKER", _Tracker()))
        stack.enter_context(mock.patch.object(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True))
        stack.enter_context(_OnCpu())
        yield


# ------------------------------------------------------------------------------------------------ as a program


def make_case(bug: Path, folder: Path, wrong: bool, pools: RankPools) -> None:
    """Make the runs of a case from the file of a bug, in a folder."""
    given = runpy.run_path(str(bug))
    flags, ranks = given["FLAGS"], given["RANKS"]
    patch = "wrong" if wrong else "right"
    alone = given.get("REFERENCE", _LAYOUT.sub("", flags))
    runs = {
        "run": (flags if wrong else given.get("RIGHT", flags), ranks, partial(_patched, bug, patch)),
        "reference": (alone, 1 if "REFERENCE" not in given else ranks, partial(_patched, bug, "right")),
    }
    for name, (of_run, number, within) in runs.items():
        run = Run(of_run, number, folder / name, given.get("MASKED", False), steps=given.get("STEPS", 1))
        run.record(pools, run.prepare(), "sketches", within).rename(folder / name / "trace")


@contextlib.contextmanager
def _patched(bug: Path, name: str) -> Iterator[None]:
    """Enter the context manager that the file of a bug has under a name, if it has one."""
    with runpy.run_path(str(bug)).get(name, nullcontext)():
        yield


def main() -> None:
    """Make the runs of a case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bug", type=Path, help="file of the bug")
    parser.add_argument("folder", type=Path, help="for the runs")
    parser.add_argument("--right", action="store_true", help="run the program as it should be")
    options = parser.parse_args()
    pools = RankPools()
    try:
        make_case(options.bug, options.folder, not options.right, pools)
    finally:
        pools.close()


if __name__ == "__main__":
    main()
