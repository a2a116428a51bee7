"""Programs that the fuzzer runs: the commands, and the parts of a training that read untrusted files."""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import megalite
from megalite.config.tokenizer import EncodingFlags
from megalite.data.corpus import Chunk
from megalite.preprocessing.encoding import EncodedChunk, encode_chunk

TREE = Path(megalite.__file__).parents[1]
SIZES = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4", "--group-query-attention",
    "--num-query-groups", "2", "--seq-length", "16", "--max-position-embeddings", "32", "--swiglu", "--normalization",
    "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
    "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-2", "--eval-iters", "0", "--log-interval", "1",
]  # fmt: skip
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "60", "--no-report"]
"""Flags of a very short run, together with `SIZES` and a number of steps."""
MODULES = (
    "tests.harness.preload",
    "megalite.commands.pretrain",
    "jinja2.sandbox",
    "rich._emoji_codes",
    "megalite.conversion.huggingface",
    "megalite.conversion.megatron",
    "megalite.conversion.native",
    "megalite.preprocessing.preprocess",
    "megalite.data.sft_dataset",
    "megalite.checkpoint.inspection",
    "megalite.extras.chaos.commands.chaos",
    "megalite.extras.planner.stage_layout",
    "megalite.extras.recovery.spares",
    "megalite.extras.verify.readers.reading",
    "megalite.process.progress",
    "megalite.watchdog.watchdog",
    "megalite.watchdog.flight_recorder",
    "tokenizers",
    "tiktoken",
    "sentencepiece.sentencepiece_model_pb2",
    "zstandard",
)
"""Modules that a program imports once, for all forked processes."""


def warm() -> None:
    """Import what programs need, and parse flags once: much of what that finds out holds for all."""
    for module in MODULES:
        with suppress(Exception):  # what is not there is missed where it is needed
            importlib.import_module(module)
    from megalite.config.parse import parse_arguments

    parse_arguments([*SIZES, *MOCK, "--train-iters", "1"])
    # A collection in a forked process would go through all of this, and so copy it.
    gc.collect()
    gc.freeze()


class _Inline:
    """Takes the place of preprocessing's worker processes, which take a second to start."""

    def __init__(self, _: int, flags: EncodingFlags) -> None:
        self._flags = flags

    def encode(self, chunk: Chunk) -> Future[EncodedChunk]:
        future: Future[EncodedChunk] = Future()
        try:
            future.set_result(encode_chunk(self._flags, chunk))
        except Exception as error:
            future.set_exception(error)
        return future

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def command(path: str, *flags: object) -> None:
    """Become `python path flags`."""
    import megalite.preprocessing.preprocess

    megalite.preprocessing.preprocess.start_workers = _Inline  # type: ignore[assignment, attr-defined]
    sys.argv = [str(TREE / path), *map(str, flags)]
    sys.path.insert(0, str((TREE / path).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def read_flags(flags: list[str], samples: int = 0) -> None:
    """Do what pretrain_gpt.py does first: check the flags, and, where samples are asked for, open the data and read
    some, as training does."""
    from megalite.commands.pretrain import saved_fields
    from megalite.config.parse import parse_arguments
    from megalite.config.validate import resolve
    from megalite.lifecycle.failure import run_main

    def main() -> int:
        config = resolve(parse_arguments(flags, saved_fields).config, 1)
        if samples:
            from megalite.training.data import open_data

            train = open_data(config).train
            for number in range(min(samples, len(train))):
                train[number]
        return 0

    sys.argv = ["pretrain_gpt.py", *flags]
    run_main(main)
