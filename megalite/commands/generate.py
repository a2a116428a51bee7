"""Write text with a trained model.

    python tools/generate.py --load run/small-llama --prompt "def main(" --temperature 0.8 --top-p 0.9
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 tools/generate.py \\
        --tp 2 --pp 2 --load run/7b --prompts questions.txt --output out.jsonl

Under torchrun the model is split over all ranks, whatever layout it was trained on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

from megalite.atomic_files import lock_file, open_itself, writing_output
from megalite.config.fields import NonNegativeInt, PositiveInt, Range
from megalite.config.near_checkpoints import require_checkpoint
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import ConfigurationError
from megalite.lifecycle.failure import run_main
from megalite.process.output import say
from megalite.process.place import place_from_environment

if TYPE_CHECKING:
    from megalite.inference.text import TextPiece

_ONE = Range(
    "1, since each rank keeps the keys and values of whole texts (--tp and --pp split the model)",
    lambda value: value == 1,
)


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    load: str
    """The run directory, one checkpoint in it (iter_0000100), or a Hugging Face folder."""
    ema: bool = False
    """Take the mean of the weights that the run has kept (--ema-decay), in place of the weights."""
    base: str | None = None
    """Current folder of the base of adapters; unset: where it was when they were trained."""
    prompt: tuple[str, ...] = ()
    """Beginning of a text; may be given several times. -: standard input."""
    prompts: str | None = None
    """File with one prompt per line; in a .jsonl file, {"prompt": "..."}."""
    output: str | None = None
    """Write the texts to this new file instead of the terminal, one JSON object per line: prompt, text,
    finish_reason."""
    max_new_tokens: NonNegativeInt = 100
    """Largest number of tokens to write; the end of a document, or of learned positions, ends the text earlier."""
    batch_size: PositiveInt = 8
    """Prompts that a stage works on together; more are faster and take more memory."""
    temperature: float = 1.0
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach p."""
    seed: int = 1234
    """Random seed; the same seed gives the same texts."""
    tokenizer_model: str | None = None
    """Current path of the tokenizer's file; unset: its path when the model was trained."""
    tensor_model_parallel_size: int | None = None
    """Ranks that share each layer's matrices (short: --tp); unset: all of a stage."""
    pipeline_model_parallel_size: int = 1
    """Stages of layers, one after the other (short: --pp)."""
    context_parallel_size: Annotated[int, _ONE] = 1
    """Ranks that each hold a part of every text (short: --cp): always 1."""
    kernels: Literal["auto", "triton", "reference"] = "auto"
    """Triton's kernels, plain PyTorch (reference), or Triton if there is a GPU and PyTorch if not (auto)."""


def main() -> int:
    """Load the latest checkpoint, split over all ranks, and stream text to the terminal or write it to a file."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "", repeated=True)
    place = place_from_environment()
    require_checkpoint(arguments.load)

    from megalite.inference.sampling import Sampling

    if arguments.output is not None and Path(arguments.output).exists():
        raise ConfigurationError(f"--output {arguments.output} already exists: remove it, or name another file")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)

    from megalite.config.kernels import KernelsConfig
    from megalite.inference.generation import check_prompts, generate
    from megalite.inference.loading import ends_of_texts, load_network, load_tokenizer, open_model
    from megalite.inference.network import choose_layout
    from megalite.inference.text import encode_prompts, in_order, of_rank_0, read_prompts
    from megalite.lifecycle.launch import joined
    from megalite.training.kernels import choose_kernels

    choose_kernels(KernelsConfig(arguments.kernels))
    model = open_model(arguments.load, mean=arguments.ema, base=arguments.base)
    layout = choose_layout(
        model.config, place.world_size, arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    )
    tokenizer = load_tokenizer(model, arguments.tokenizer_model)

    def read() -> list[list[int]]:
        prompts = encode_prompts(tokenizer, read_prompts(arguments.prompt, arguments.prompts))
        check_prompts(model.config, prompts)
        return prompts

    with joined(layout, place, repr(arguments)) as mesh:
        prompts = of_rank_0(mesh, read)
        events = generate(
            load_network(model, mesh),
            prompts,
            max_new_tokens=arguments.max_new_tokens,
            ends=ends_of_texts(model, tokenizer, arguments.tokenizer_model),
            sampling=sampling,
            batch_size=arguments.batch_size,
            vocab_size=tokenizer.vocab_size,
        )
        if mesh.rank > 0:
            for _ in events:
                pass
        elif arguments.output is None:
            show(in_order(tokenizer, prompts, events), len(prompts))
        else:
            write(in_order(tokenizer, prompts, events), arguments.output)
    return 0


def show(pieces: Iterable[TextPiece], count: int) -> None:
    """Stream texts to the terminal, each under a line with its number if there are several."""
    begun = -1
    try:
        for piece in pieces:
            if count > 1 and piece.index > begun:
                say(f"==> {piece.index + 1} of {count} <==")
                begun = piece.index
            say(piece.text, end="" if piece.finish is None else "\n", exact=not sys.stdout.isatty())
    except KeyboardInterrupt:
        say()  # so that the message about the interruption begins on a new line
        raise


def _held(path: Path) -> IO[bytes]:
    """Open an empty file that no other process writes. Raises ConfigurationError if one does."""
    file: IO[bytes] = open_itself(path, "ab")
    try:
        lock_file(file)
    except BlockingIOError as error:
        file.close()
        raise ConfigurationError(f"{path} is being written by another process: name another --output") from error
    file.truncate(0)
    return file


def write(pieces: Iterable[TextPiece], output: str) -> None:
    """Write each text when it is complete, into OUTPUT.partial, which is renamed when all are there.

    After an interruption or a kill, that file has the texts that are complete, and nothing keeps the next run from
    beginning anew.
    """
    parts: list[str] = []
    texts = 0
    unfinished = Path(f"{output}.partial")
    with writing_output(unfinished):
        file = _held(unfinished)
    with file:
        for piece in pieces:
            parts.append(piece.text)
            if piece.finish is not None:
                record = {"prompt": parts[0], "text": "".join(parts[1:]), "finish_reason": piece.finish}
                with writing_output(unfinished):
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    file.flush()
                parts = []
                texts += 1
        if os.path.exists(output):
            raise ConfigurationError(f"--output {output} has appeared meanwhile: the texts are in {unfinished}")
        os.replace(unfinished, output)
    say(f"{output}: {texts} {'text' if texts == 1 else 'texts'}")


command = partial(run_main, main)
