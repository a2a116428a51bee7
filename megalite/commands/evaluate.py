"""Measure how well a model predicts text, what it finds in long texts, and its results in the tasks of lm_eval.

    python tools/evaluate.py --load run/small-llama --data-path run/corpus_text_document --stride 64
    python tools/evaluate.py --load run/small-llama --text held_out.jsonl notes.txt
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 tools/evaluate.py \\
        --load run/large --tensor-model-parallel-size 2 --tasks arc_easy,hellaswag --num-fewshot 5 --output results.json
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 8 tools/evaluate.py \\
        --load run/long --context-parallel-size 8 --needle-lengths 4096 32768 131072 --micro-batch-size 1

Any layout works, whatever layout the model was trained on: ranks beyond tensor times pipeline parallel share the work.
docs/evaluation.md defines the figures.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megalite.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Share, flag_of
from megalite.config.near_checkpoints import require_checkpoint
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import ConfigurationError
from megalite.lifecycle.failure import run_main
from megalite.process.output import say
from megalite.process.place import place_from_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from megalite.data.tokenizers import Tokenizer
    from megalite.inference.documents import Documents
    from megalite.inference.loading import TrainedModel
    from megalite.inference.needle import Haystack

DEPTHS, TRIALS, SEED = (0.0, 0.25, 0.5, 0.75, 1.0), 10, 1234
"""Defaults of --needle-depths, --needle-trials and --needle-seed."""


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    load: str
    """The run directory, one checkpoint in it (iter_0000100), or a Hugging Face folder."""
    ema: bool = False
    """Take the mean of the weights that the run has kept (--ema-decay), in place of the weights."""
    base: str | None = None
    """Current folder of the base of adapters; unset: where it was when they were trained."""
    data_path: tuple[str, ...] = ()
    """Prefixes of .bin and .idx files to predict; with several, give a weight before each, or before none."""
    text: tuple[str, ...] = ()
    """Files of text to predict: JSON lines, .txt (a file is a document), also as .gz or .zst, and .parquet."""
    json_keys: tuple[str, ...] = ("text",)
    """The fields of a record that are text, each a document."""
    tasks: tuple[str, ...] = ()
    """Tasks, groups or tags of lm_eval, or patterns of their names, between spaces or commas."""
    num_fewshot: int | None = None
    """Examples before each question of a task; unset: the task's own number."""
    include_path: str | None = None
    """Folder with your own tasks."""
    needle_lengths: tuple[PositiveInt, ...] = ()
    """Hide a number in texts of these many tokens, ask for it, and count how often the model finds it."""
    needle_depths: tuple[Share, ...] = ()
    """Places of the number, as shares of the text before it; unset: 0 0.25 0.5 0.75 1."""
    needle_trials: PositiveInt | None = None
    """Texts of each length and depth; unset: 10."""
    needle_haystack: str | None = None
    """File of text, or prefix of .bin and .idx files, to hide the number in; unset: sentences that are made up."""
    needle_seed: NonNegativeInt | None = None
    """Seed of names, numbers and texts; unset: 1234."""
    limit: PositiveFloat | None = None
    """Take only this many documents of each data set and of each task; below 1: this share of them."""
    seq_length: int | None = None
    """Tokens that the model reads at once; unset: as in training."""
    stride: int | None = None
    """New tokens that each window of a long document predicts; unset: seq-length. Fewer: more context, more work."""
    micro_batch_size: PositiveInt = 8
    """Windows in one forward; the figures do not depend on it."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer's matrices (short: --tp)."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that each hold some of the layers (short: --pp)."""
    context_parallel_size: PositiveInt = 1
    """Ranks that each hold a part of every window (short: --cp)."""
    output: str | None = None
    """JSON file to write all figures to."""
    tokenizer_model: str | None = None
    """Current path of the tokenizer's file; unset: its path when the model was trained."""
    kernels: Literal["auto", "triton", "reference"] = "auto"
    """Triton's kernels, plain PyTorch (reference), or Triton if there is a GPU and PyTorch if not (auto)."""


def main() -> int:
    """Read the documents, load the latest checkpoint, evaluate, and print tables."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    check(arguments)
    place = place_from_environment()
    require_checkpoint(arguments.load)
    if place.rank or not sys.stderr.isatty():
        # Libraries read these variables when they are imported, and importing torch imports some of these libraries.
        os.environ |= {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

    from megalite.config import ParallelConfig
    from megalite.config.kernels import KernelsConfig
    from megalite.inference.loading import ends_of_texts, load_network, load_tokenizer, open_model
    from megalite.inference.needle import find_needles, needle_table
    from megalite.inference.network import check_layout
    from megalite.inference.perplexity import evaluate_all, table
    from megalite.lifecycle.launch import joined
    from megalite.storage import write_atomically
    from megalite.training.kernels import choose_kernels

    choose_kernels(KernelsConfig(arguments.kernels))
    model = open_model(arguments.load, mean=arguments.ema, base=arguments.base)
    batch_size = arguments.micro_batch_size
    tp, pp = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    cp = arguments.context_parallel_size
    check_layout(model.config, tp, pp)
    if place.world_size % (tp * pp * cp):
        also = f" x --context-parallel-size {cp}" if cp > 1 else ""
        raise ConfigurationError(
            f"{place.world_size} ranks cannot be divided: --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp}{also} take {tp * pp * cp} for each copy of the model"
        )
    length, stride = lengths(arguments, model)
    tokenizer = load_tokenizer(model, arguments.tokenizer_model)
    documents, tasks = read_documents(arguments, tokenizer, place.local_rank == 0), None
    haystack = read_filler(arguments, model, tokenizer, place.local_rank == 0) if arguments.needle_lengths else None
    if arguments.tasks:
        from megalite.inference import lm_eval_adapter

        names = [name for names in arguments.tasks for name in names.split(",") if name]
        tasks = lm_eval_adapter.load_tasks(names, arguments.include_path)
    with joined(ParallelConfig(tp, pp, cp), place, repr(arguments)) as mesh:
        network = load_network(model, mesh)
        results: dict[str, Any] = {"checkpoint": str(model.path), "seq_length": length, "stride": stride}
        if documents:
            with progress("predicting", sum(each.count for each in documents), "tokens", mesh.rank) as advance:
                figures = evaluate_all(network, tokenizer, documents, length, stride, batch_size, advance)
            results["data"] = [each.to_json() for each in figures]
            if mesh.rank == 0:
                say(table(figures))
        if haystack is not None:
            depths, trials = arguments.needle_depths or DEPTHS, arguments.needle_trials or TRIALS
            samples = len(arguments.needle_lengths) * len(depths) * trials
            with progress("searching", samples, "texts", mesh.rank) as advance:
                of_samples = (arguments.needle_lengths, depths, trials, seed_of(arguments))
                found = find_needles(network, tokenizer, haystack, *of_samples, batch_size, advance)
            results["needle"] = [each.to_json() for each in found]
            results["haystack"] = haystack.name
            if mesh.rank == 0:
                say(needle_table(found))
        if tasks is not None:
            language_model = lm_eval_adapter.MegaliteLM(
                network,
                tokenizer,
                ends_of_texts(model, tokenizer, arguments.tokenizer_model),
                max_length=length,
                micro_batch_size=batch_size,
                show=lambda total, unit: progress("evaluating", total, unit, mesh.rank),
            )
            results["tasks"] = lm_eval_adapter.evaluate_tasks(
                language_model, tasks, num_fewshot=arguments.num_fewshot, limit=arguments.limit
            )
            if mesh.rank == 0:
                say(lm_eval_adapter.table(results["tasks"]))
        if arguments.output is not None and mesh.rank == 0:
            text = json.dumps(results, indent=2, default=str) + "\n"
            write_atomically(Path(arguments.output), text.encode())
    return 0


def check(arguments: Arguments) -> None:
    """Raise ConfigurationError for flags that are wrong for every checkpoint."""
    if not (arguments.data_path or arguments.text or arguments.tasks or arguments.needle_lengths):
        raise ConfigurationError(
            "there is nothing to evaluate on: give --data-path, --text, --tasks or --needle-lengths"
        )
    for name in ("needle_depths", "needle_trials", "needle_haystack", "needle_seed"):
        if not arguments.needle_lengths and getattr(arguments, name) not in (None, ()):
            raise ConfigurationError(f"{flag_of(name)} is for --needle-lengths, which is not given")
    for name in ("needle_lengths", "needle_depths"):
        if len(set(getattr(arguments, name))) < len(getattr(arguments, name)):
            raise ConfigurationError(f"{flag_of(name)} has a value twice: give each once")
    if not arguments.tasks and (arguments.num_fewshot is not None or arguments.include_path is not None):
        raise ConfigurationError("--num-fewshot and --include-path are for --tasks, which is not given")
    if arguments.tasks and arguments.context_parallel_size > 1:
        raise ConfigurationError(
            f"--tasks with --context-parallel-size {arguments.context_parallel_size}: tasks may generate text, which "
            "needs the whole sequence on each rank: give --context-parallel-size 1"
        )
    if arguments.output is not None and Path(arguments.output).is_dir():
        raise ConfigurationError(f"--output {arguments.output} is a folder: name a file")


def lengths(arguments: Arguments, model: TrainedModel) -> tuple[int, int]:
    """Return --seq-length and --stride, or their defaults. Raises ConfigurationError if the model cannot use them."""
    length = model.sequence_length if arguments.seq_length is None else arguments.seq_length
    if length is None:
        raise ConfigurationError(f"{model.path} does not say how many tokens it was trained to read: give --seq-length")
    stride = length if arguments.stride is None else arguments.stride
    rows = model.config.learned_positions
    if length < 1 or (rows is not None and length > rows):
        most = "" if rows is None else f" and at most {rows}, the positions that the model has learned"
        raise ConfigurationError(f"--seq-length {length}: must be at least 1{most}")
    if not 1 <= stride <= length:
        raise ConfigurationError(
            f"--stride {stride}: must be from 1 to --seq-length {length}, so that every token is predicted"
        )
    return length, stride


def read_documents(arguments: Arguments, tokenizer: Tokenizer, verify: bool) -> list[Documents]:
    """Return the documents of --data-path and of --text.

    Args:
        arguments: the flags.
        tokenizer: the tokenizer of the model.
        verify: compare the checksums of --data-path.

    Raises:
        ConfigurationError: the flags contradict each other.
        DataError: a file cannot be read or is damaged.
    """
    from megalite.inference.documents import read_texts, read_token_files

    documents = []
    if arguments.data_path:
        documents += read_token_files(arguments.data_path, tokenizer, arguments.limit, verify)
    if arguments.text and any(each.weight is not None for each in documents):
        raise ConfigurationError("--text has no weight in the blend of --data-path: leave one of them out")
    return documents + read_texts(arguments.text, arguments.json_keys, tokenizer, arguments.limit)


def read_filler(arguments: Arguments, model: TrainedModel, tokenizer: Tokenizer, verify: bool) -> Haystack:
    """Return the text in which needles are hidden.

    Args:
        arguments: the flags.
        model: the model.
        tokenizer: its tokenizer.
        verify: compare the checksums of token files.

    Raises:
        ConfigurationError: the model cannot read so many tokens, or its tokenizer has no text.
        DataError: a file cannot be read or is damaged.
    """
    from megalite.inference.needle import generated_haystack, read_haystack

    longest, rows = max(arguments.needle_lengths), model.config.learned_positions
    if rows is not None and longest > rows:
        raise ConfigurationError(f"--needle-lengths {longest}: the model has learned {rows} positions: at most these")
    if arguments.needle_haystack is None:
        return generated_haystack(longest, seed_of(arguments), tokenizer)
    return read_haystack(arguments.needle_haystack, arguments.json_keys, tokenizer, verify)


def seed_of(arguments: Arguments) -> int:
    """Return --needle-seed, or its default."""
    return SEED if arguments.needle_seed is None else arguments.needle_seed


def progress(doing: str, total: int, unit: str, rank: int) -> AbstractContextManager[Callable[[int], None]]:
    """Return a context manager that shows the progress of the work on rank 0."""
    from megalite.process.progress import show_progress

    return nullcontext(lambda done: None) if rank else show_progress(doing, total, unit)


command = partial(run_main, main)
