"""Tokens a second from JSON lines to token files: ours, the limit, and Megatron-LM's algorithm, in turn.

    python -m benchmarks.preprocess [--megabytes 100] [--rounds 9] [--memory]

The text is the Python sources on this machine (the standard library's first, then what is installed), cut into
documents of 100 lines and shuffled; what is missing to the size is repeated, and the share of new text is printed. The
vocabularies, 16,384 tokens each, are trained on part of it. Every contender has two processes that tokenize:

    limit      both hold half of the texts in memory and only encode: the library's fastest call, nothing written;
               counted from where both have loaded
    rival      Megatron-LM's: a pool of processes, each line parsed and encoded by a call of its own, the tokens sent
               back as lists and written document by document; counted from the start of the process
    plain      tools/preprocess_data.py --fast-encoding off; counted from the start of the process
    fast       tools/preprocess_data.py; counted from the start of the process

A figure is the median over the rounds. CPU time counts all processes: on a busy machine it is steadier than the clock.
--memory compares the peak memory of any process for 10 MB and 500 MB besides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import write_results
from megalite.config.tokenizer import TokenizerFlags
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.preprocessing.tokenizer_training import train_byte_level_bpe, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 2
VOCABULARY = 16_384
DOCUMENT_LINES = 100
KINDS = {"HuggingFaceTokenizer": "bpe", "SentencePieceTokenizer": "sentencepiece.model"}


def write_corpus(path: Path, megabytes: float) -> float:
    """Write JSON lines of about this size; returns the share of them that is not repeated."""
    documents = [*_documents(megabytes * 1e6)]
    size = sum(map(len, documents))
    new = min(1.0, size / (megabytes * 1e6))
    repeated = list(itertools.islice(itertools.cycle(documents), int(len(documents) / new)))
    random.Random(0).shuffle(repeated)
    path.write_bytes(b"".join(repeated))
    return new


def _documents(size: float) -> Iterator[bytes]:
    paths = sysconfig.get_paths()
    files = (file for name in ("stdlib", "purelib") for file in sorted(Path(paths[name]).rglob("*.py")))
    seen = set()
    for file in files:
        lines = file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
        for first in range(0, len(lines), DOCUMENT_LINES):
            text = "".join(lines[first : first + DOCUMENT_LINES])
            if text not in seen:
                seen.add(text)
                line = json.dumps({"text": text}).encode() + b"\n"
                size -= len(line)
                yield line
        if size < 0:
            return


def train(folder: Path, corpus: Path) -> None:
    """Vocabularies from the first megabytes."""
    sample = folder / "sample.jsonl"
    with corpus.open("rb") as file:
        sample.write_bytes(b"".join(file.readlines(4_000_000)))
    train_byte_level_bpe([str(sample)], ["text"], str(folder / "bpe"), VOCABULARY, PROCESSES)
    train_tokenizer([str(sample)], ["text"], str(folder / "sentencepiece"), VOCABULARY, "bpe", PROCESSES)


def tokenizer(kind: Any, folder: Path) -> Tokenizer:
    flags = TokenizerFlags(tokenizer_type=kind, tokenizer_model=str(folder / KINDS[kind]))
    return build_tokenizer(flags, fast_encoding="off")


def texts(corpus: Path) -> list[str]:
    with corpus.open("rb") as file:
        return [json.loads(line)["text"] for line in file]


def limit(kind: str, folder: Path, corpus: Path) -> tuple[float, float]:
    """Wall and CPU seconds in which two processes encode what they hold in memory."""
    context = multiprocessing.get_context("spawn")
    barrier, cpu = context.Barrier(PROCESSES + 1), context.SimpleQueue()
    arguments = ((kind, folder, corpus, part, barrier, cpu) for part in range(PROCESSES))
    processes = [context.Process(target=_encode_part, args=each) for each in arguments]
    for process in processes:
        process.start()
    barrier.wait()
    start = time.perf_counter()
    seconds = sum(cpu.get() for _ in processes)
    return time.perf_counter() - start, seconds


def _encode_part(kind: str, folder: Path, corpus: Path, part: int, barrier: Any, cpu: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder, mine = tokenizer(kind, folder), texts(corpus)[part::PROCESSES]
    encoder.encode_documents(mine[:10])
    barrier.wait()
    start = time.process_time()
    for first in range(0, len(mine), 128):
        encoder.encode_documents(mine[first : first + 128])
    cpu.put(time.process_time() - start)


_encoder: Any = None


def _start_rival(kind: str, folder: Path) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = tokenizer(kind, folder)


def _encode_line(line: bytes) -> list[int]:
    ids: list[int] = _encoder.encode(json.loads(line)["text"])
    return [*ids, _encoder.eod]


def rival(kind: str, folder: Path, corpus: Path, output: Path) -> None:
    """Megatron-LM's preprocess_data.py, less what it prints."""
    lengths: list[int] = []
    with (
        multiprocessing.get_context("fork").Pool(PROCESSES, _start_rival, (kind, folder)) as pool,
        corpus.open("rb") as lines,
        output.open("wb") as file,
    ):
        for ids in pool.imap(_encode_line, lines, 32):
            file.write(np.array(ids, np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
    pointers = [0, *itertools.accumulate(lengths)]
    output.with_suffix(".idx").write_bytes(np.array(lengths, np.int32).tobytes() + np.array(pointers).tobytes())


def command(contender: str, kind: str, folder: Path, corpus: Path) -> list[str]:
    if contender in ("rival", "limit"):
        return [sys.executable, __file__, "--contender", contender, kind, str(folder), str(corpus)]
    return [
        *(sys.executable, str(ROOT / "tools/preprocess_data.py"), "--append-eod", "--workers", str(PROCESSES)),
        *("--input", str(corpus), "--output-prefix", str(folder / "output"), "--log-interval", str(10**9)),
        *("--tokenizer-type", kind, "--tokenizer-model", str(folder / KINDS[kind])),
        *("--fast-encoding", "off" if contender == "plain" else "require"),
    ]


def measure(contender: str, kind: str, folder: Path, corpus: Path) -> dict[str, float]:
    """Wall and CPU seconds of a run in a process of its own."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command(contender, kind, folder, corpus), check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if contender == "limit":
        wall, cpu = map(float, result.stdout.split())
    return {"wall_s": wall, "cpu_s": cpu}


def peak_memory(kind: str, folder: Path, corpus: Path) -> int:
    """Bytes of the largest process of the fast path, where this process has had no other children."""
    measure("fast", kind, folder, corpus)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def speed(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    corpus = folder / "corpus.jsonl"
    new = write_corpus(corpus, arguments.megabytes)
    train(folder, corpus)
    figures: dict[str, Any] = {"corpus_bytes": corpus.stat().st_size, "new_text_share": new}
    print(f"{corpus.stat().st_size / 1e6:.1f} MB, {new:.0%} of it not repeated")
    for kind in KINDS:
        encoder = tokenizer(kind, folder)
        tokens = sum(len(ids) + 1 for ids in encoder.encode_documents(texts(corpus)))
        rounds: dict[str, list[dict[str, float]]] = {"limit": [], "rival": [], "plain": [], "fast": []}
        for _ in range(arguments.rounds):
            for contender, results in rounds.items():
                results.append(measure(contender, kind, folder, corpus))
        medians = {
            clock: {name: statistics.median(r[clock] for r in results) for name, results in rounds.items()}
            for clock in ("wall_s", "cpu_s")
        }
        figures[kind] = {"tokens": tokens, "rounds": rounds, "medians": medians}
        for (clock, of_clock), name in itertools.product(medians.items(), rounds):
            rate, of_limit, of_rival = (x / of_clock[name] for x in (tokens, of_clock["limit"], of_clock["rival"]))
            print(
                f"{kind:24} {clock:6} {name:6} {rate / 1e6:6.2f} M tokens/s, {of_limit:5.2f} of the limit, "
                f"{of_rival:5.2f} x the rival",
                flush=True,
            )
    return figures


def memory(folder: Path) -> dict[str, Any]:
    """Peaks of the largest process, for a small and a large corpus, each in a fresh measuring process."""
    figures: dict[str, Any] = {}
    for megabytes in (10, 500):
        corpus = folder / f"corpus{megabytes}.jsonl"
        write_corpus(corpus, megabytes)
        if not (folder / "bpe").exists():
            train(folder, corpus)
        for kind in KINDS:
            # The peak of children is that of all before: so each measurement has a process of its own.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peak = pool.apply(peak_memory, (kind, folder, corpus))
            figures.setdefault(kind, {})[f"{megabytes} MB"] = peak
            print(f"{kind:24} {megabytes:4} MB: {peak / 2**20:7.1f} MiB", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--contender", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        contender, kind, folder, corpus = arguments.contender
        if contender == "limit":
            print(*limit(kind, Path(folder), Path(corpus)))
        else:
            rival(kind, Path(folder), Path(corpus), Path(folder) / "rival.bin")
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = {package: version(package) for package in ("tokenizers", "tiktoken", "sentencepiece")}
        figures |= speed(arguments, Path(folder))
        if arguments.memory:
            figures["peak_memory_bytes"] = memory(Path(folder))
        write_results("preprocess", figures)


if __name__ == "__main__":
    main()
