"""Convert a model between megalite, Hugging Face and Megatron-LM: its weights, configuration and tokenizer.

    python tools/checkpoint/convert.py --loader hf --saver megalite --load-dir Llama-3.2-1B --save-dir run/llama
    python tools/checkpoint/convert.py --loader megalite --saver hf --load-dir run/llama --save-dir exported --verify
    python tools/checkpoint/convert.py --loader megatron --saver hf --load-dir checkpoints/gpt --save-dir exported

Weights are cast only if --target-params-dtype asks for it, and rounded to fp8 only if --quantize does. A model that the
other format cannot describe exactly is refused, never approximated. The optimizer's state is not converted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megalite.config.checkpoint import checkpoints_in
from megalite.config.fields import CORES, PositiveFloat, PositiveInt, Workers, flag_of
from megalite.config.near_checkpoints import no_checkpoint
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import CheckpointError, ConfigurationError
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say

if TYPE_CHECKING:
    import torch

    from megalite.conversion.opened import OpenedModel
    from megalite.process.progress import Advance

Kind = Literal["megalite", "hf", "megatron", "peft"]


@dataclass(frozen=True)
class Arguments:
    """The flags; their names are those of Megatron-LM's tool."""

    loader: Kind
    """Format of --load-dir: a run directory (or a checkpoint in it) of megalite, a Hugging Face folder, Megatron's, or
    a folder of PEFT. Adapters are merged into the base that they name, unless --saver is peft."""
    saver: Kind
    """Format of --save-dir."""
    load_dir: str
    """The folder to read."""
    save_dir: str
    """The folder to write: a run directory for megalite and Megatron, else a folder that is empty or does not exist
    yet."""
    model_type: Literal["GPT"] = "GPT"
    """The kind of model: there is only one."""
    target_params_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype to cast the weights to; unset: no cast. fp32 takes megalite's master weights, if there are any."""
    quantize: Literal["fp8-blockwise"] | None = None
    """Write the matrices of linear layers and experts of a Hugging Face folder in fp8 (e4m3) with a scale for each
    tile of 128 x 128, as DeepSeek-V3 is published, and as --fp8-recipe blockwise rounds them."""
    ema: bool = False
    """Take the mean of the weights that the run has kept (--ema-decay), in place of the weights."""
    base: str | None = None
    """Current folder of the base of adapters; unset: where it was when they were trained."""
    target_tensor_parallel_size: PositiveInt | None = None
    """Number of tensor-parallel ranks. megalite: one file is written per rank (any layout loads any files). Megatron:
    the vocabulary is padded for this many ranks."""
    target_pipeline_parallel_size: PositiveInt | None = None
    """Number of pipeline stages of such ranks to write files for, for megalite."""
    true_vocab_size: int | None = None
    """The number of tokens in the vocabulary before padding, for Megatron checkpoints that do not record it."""
    tokenizer_model: str | None = None
    """A Hugging Face folder with the tokenizer to copy; unset: the one that --load-dir has or names."""
    max_shard_size: PositiveFloat | None = None
    """Largest size of a Hugging Face file in GB; unset: 5."""
    verify: bool = False
    """Load both sides again and compare: weights bit for bit, and logits of random tokens, also with transformers."""
    workers: Workers = CORES
    """Threads that copy tensors; by default one per core."""


def main() -> None:
    """Parse the flags, convert the model, print a summary, and verify the result if --verify is given."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    check(arguments)
    from megalite.conversion.opened import Watched
    from megalite.process.progress import show_progress

    opened = open_model(arguments.loader, Path(arguments.load_dir), arguments)
    if arguments.loader == arguments.saver and opened.adapters is None:
        raise ConfigurationError("--loader equals --saver: megalite-reshard rewrites a checkpoint of megalite")
    if arguments.saver == "peft":
        from megalite.conversion.peft import write_peft

        write_peft(opened, Path(arguments.save_dir), dtype=dtype(arguments))
        say(f"{arguments.save_dir}: the adapters of {opened.what}")
        return
    if arguments.saver == "hf":
        from megalite.conversion.export import without_unknown_depths

        opened = without_unknown_depths(opened)
    if arguments.tokenizer_model is not None:
        from megalite.conversion.huggingface import tokenizer_fields

        folder = Path(arguments.tokenizer_model)
        if not tokenizer_fields(folder):
            raise ConfigurationError(f"--tokenizer-model {folder} has neither tokenizer.json nor tokenizer.model")
        opened = replace(opened, folder=folder, data=tokenizer_fields(folder))
    watched = Watched(opened.source)
    opened = replace(opened, source=watched)
    target = dtype(arguments)
    if arguments.quantize is None:
        kinds = opened.source.tensors.values()
        size = sum(kind.size // kind.dtype.itemsize * (target or kind.dtype).itemsize for kind in kinds)
    else:
        from megalite.conversion.export import export_of

        size = sum(kind.size for kind in export_of(opened, target, in_blocks=True).source.tensors.values())
    with show_progress("converting", size) as advance:
        written = write_model(opened, arguments, advance)
    tensors = len(opened.source.tensors)
    say(f"{written}: from {opened.what}, {tensors:,} tensors, {size:,} bytes")
    if not opened.data or (arguments.saver == "hf" and opened.folder is None):
        say("without a tokenizer: --tokenizer-model names a folder that has one")
    for note in (*opened.notes, *watched.notes()):
        say(note, to_error=True)
    if arguments.verify:
        found = open_model(arguments.saver, Path(arguments.save_dir), arguments)
        if arguments.quantize is None:
            report(opened, found)
            return
        from megalite.conversion.export import rounded_to_blocks
        from megalite.conversion.verification import farthest

        report(rounded_to_blocks(opened, target), found)
        cost, name = farthest(opened.source, found.source)
        apart = f"whose weights differ from the checkpoint's by {cost:.2%} of their norm at most, in {name}"
        say(f"rounding: this compares with the model as it is rounded, {apart}")


def check(arguments: Arguments) -> None:
    """Raise ConfigurationError for flags that contradict each other."""
    if arguments.loader == arguments.saver != "megalite":
        raise ConfigurationError("--loader equals --saver: megalite-reshard rewrites a checkpoint of megalite")
    if arguments.saver == "peft" and arguments.verify:
        raise ConfigurationError("--verify compares all weights, and a folder of PEFT has adapters alone: drop it")
    for name, savers in (
        ("target_tensor_parallel_size", ("megalite", "megatron")),
        ("target_pipeline_parallel_size", ("megalite",)),
        ("max_shard_size", ("hf",)),
        ("quantize", ("hf",)),
    ):
        if getattr(arguments, name) is not None and arguments.saver not in savers:
            raise ConfigurationError(f"{flag_of(name)} needs --saver {' or '.join(savers)}")
    if arguments.true_vocab_size is not None and arguments.loader != "megatron":
        raise ConfigurationError("--true-vocab-size needs --loader megatron: the others have it")
    if arguments.ema and arguments.loader != "megalite":
        raise ConfigurationError("--ema needs --loader megalite: the others have no mean of the weights")
    if arguments.base is not None and arguments.loader != "megalite":
        raise ConfigurationError("--base needs --loader megalite: a folder of PEFT names its base in its configuration")
    if not Path(arguments.load_dir).is_dir():
        raise CheckpointError(no_checkpoint(arguments.load_dir, "--load-dir"))


def dtype(arguments: Arguments) -> torch.dtype | None:
    """Return the dtype to cast weights to; None: no cast."""
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return None if arguments.target_params_dtype is None else kinds[arguments.target_params_dtype]


def open_model(kind: Kind, folder: Path, arguments: Arguments) -> OpenedModel:
    """Open a model in one of the formats. Raises CheckpointError if it cannot be read."""
    if kind == "megalite":
        from megalite.conversion.native import open_megalite

        if kind != arguments.loader:
            return open_megalite(folder)
        return open_megalite(folder, dtype(arguments), mean=arguments.ema, base=arguments.base)
    if kind == "peft":
        from megalite.conversion.native import open_folder

        if not (folder / "adapter_config.json").is_file():
            raise CheckpointError(f"{folder} has no adapter_config.json: it is not a folder of PEFT")
        return open_folder(folder)
    if kind == "hf":
        if not (folder / "config.json").is_file():
            other = "" if (found := checkpoints_in(folder)) is None else f" (--loader {found} reads its checkpoint)"
            raise CheckpointError(f"{folder} has no config.json: it is not a Hugging Face folder{other}")
        from megalite.conversion.huggingface import open_huggingface

        return open_huggingface(folder)
    from megalite.conversion.megatron import open_megatron

    return open_megatron(folder, arguments.true_vocab_size)


def write_model(opened: OpenedModel, arguments: Arguments, advance: Advance) -> Path:
    """Write the model in the other format, and return the path. Raises CheckpointError if this is not possible."""
    directory = Path(arguments.save_dir)
    shared: dict[str, Any] = {"dtype": dtype(arguments), "workers": arguments.workers, "advance": advance}
    tensor, pipeline = arguments.target_tensor_parallel_size, arguments.target_pipeline_parallel_size
    if arguments.saver == "megalite":
        from megalite.config import ParallelConfig
        from megalite.conversion.native import write_megalite

        layout = None if tensor is None and pipeline is None else ParallelConfig(tensor or 1, pipeline or 1)
        return write_megalite(opened, directory, layout=layout, **shared)
    if arguments.saver == "hf":
        from megalite.conversion.huggingface import write_huggingface

        in_blocks, shard = arguments.quantize is not None, int((arguments.max_shard_size or 5) * 1e9)
        write_huggingface(opened, directory, shard=shard, in_blocks=in_blocks, **shared)
        return directory
    from megalite.conversion.megatron import write_megatron

    return write_megatron(opened, directory, tensor_parallel_size=tensor or 1, **shared)


def report(first: OpenedModel, second: OpenedModel) -> None:
    """Print the differences between two models. Raises CheckpointError if they are not equal."""
    from megalite.conversion.verification import TOLERANCE, verify

    found = verify(first, second)
    same = found.tensors - len(found.different)
    say(f"verified: {same:,} of {found.tensors:,} tensors are the same bit for bit")
    say(f"verified: logits differ by {found.logits:.1e} at most, the largest is {found.largest:.1f}")
    if found.transformers is not None:
        say(f"verified: those of transformers differ from megalite's by {found.transformers:.1e} at most")
    elif second.is_huggingface or first.is_huggingface:
        say("not compared with transformers: pip install transformers")
    if found.different:
        raise CheckpointError(f"the two sides are not the same model: they differ in {', '.join(found.different[:8])}")
    if (found.transformers or 0.0) > TOLERANCE * found.largest:
        raise CheckpointError("transformers computes other logits from the Hugging Face folder")


command = partial(run_tool, main)
