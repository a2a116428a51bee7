"""Megatron-LM's commands, scaled down to run on a few CPU processes in a second.

Only sizes, lengths of time, and paths change, NCCL becomes gloo, and fp16 begins with a smaller loss scale, so that it
does not spend the few steps on finding one; W&B, which needs a library and a network, is left out. Every other flag
stays as it is. Sizes of the layout are halved, the largest one first, until the ranks suffice: a layout of 8 x 16 ranks
becomes one of 2 x 2, and stays tensor and pipeline parallel. Ratios that the network depends on stay: those of the
feed-forward layer, a head, a group of queries and a latent.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from megalite.config.command_line import flag_groups
from megalite.config.layer_specs import count_of_pattern
from megalite.config.pipeline_layout import stages_of_letters
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from megalite.preprocessing.tokenizer_training import train_tokenizer

PATTERN, LINEAR = "hybrid-layer-pattern", ("linear-key-head-dim", "linear-value-head-dim")
LETTERS, FREQUENCY = "pipeline-model-parallel-layout", "moe-layer-freq"
OF_HEADS = ("kv-channels", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "dsa-indexer-head-dim")
OF_HIDDEN = (
    *("ffn-hidden-size", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"),
    *("q-lora-rank", "kv-lora-rank"),
)
ITERATIONS, HIDDEN, HEADS, LENGTH, EXPERTS, MICRO_BATCHES = 6, 64, 8, 32, 8, 8
DENSE = ("pipeline-model-parallel-size", "tensor-model-parallel-size", "context-parallel-size")
SPARSE = ("pipeline-model-parallel-size", "expert-model-parallel-size", "expert-tensor-parallel-size")
_TEST = "d98e8a64:tests/functional_tests/test_cases/{}/model_config.yaml"
PATHS = ("save", "load", "data-cache-path", "tensorboard-dir")
FILES = {
    "data-path": "text",
    "vocab-file": "vocab.json",
    "merge-file": "merges.txt",
    "tokenizer-model": "tokenizer.model",
}
_TIME = ("train-iters", "lr-decay-iters", "train-samples", "lr-decay-samples")
_WARM_UP = ("lr-warmup-iters", "lr-warmup-samples")


def command(name: str) -> list[str]:
    """Return the flags of a command, by its source, or by the name of one of Megatron-LM's functional tests."""
    return shlex.split(_commands().get(name) or _commands()[_TEST.format(name)])


@cache
def _commands() -> Mapping[str, str]:
    rows = json.loads(Path(__file__).with_name("commands.json").read_text())
    return {source: row["flags"] for row in rows for source in row["sources"]}


def write_files(folder: Path) -> None:
    """Write the files that commands name: a text of few words as tokens, and the tokenizers of its bytes."""
    text = "the cat sat on the mat, and the dog sat on the cat.\n"
    (folder / "text.jsonl").write_text((json.dumps({"text": text}) + "\n") * 100)
    train_tokenizer([str(folder / "text.jsonl")], ["text"], str(folder / "tokenizer"), vocab_size=280)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [*map(chr, printable), *(chr(256 + number) for number in range(256 - len(printable)))]
    vocabulary = {name: number for number, name in enumerate([*characters, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        documents = np.full(50_000, len(text))
        writer.add_documents(np.tile([*text.encode()], len(documents)), documents, np.ones_like(documents))
        writer.finish()


def scaled(
    argv: Sequence[str], files: Path, run: Path, ranks: int, replicas: int = 1, without: Collection[str] = ()
) -> list[str]:
    """Return a command for this number of ranks, of which at least `replicas` share their weights.

    `files`: folder from `write_files`; `run`: folder of the run, and of `load` with --finetune; `without`: flags that
    the command loses.
    """
    groups = [group for group in flag_groups(argv) if group[0] not in without]
    flags = {name: " ".join(values) for name, values in groups if not name.startswith("wandb-")}
    flags.setdefault("save", "")  # so that a command that saves nothing leaves its losses
    if PATTERN in flags:  # of each kind of layer one per stage, and Mamba-2's heads as narrow as attention's
        main, *depths = flags[PATTERN].split("/")
        main = "|".join("".join(dict.fromkeys(stage)) for stage in main.split("|"))
        flags[PATTERN] = "/".join([main, *depths])
        flags |= {"mamba-head-dim": str(HIDDEN // HEADS), "mamba-state-dim": str(HIDDEN // HEADS)}
    layout = _layout(flags, ranks, replicas)
    stages = layout["pipeline-model-parallel-size"]
    if LETTERS in flags:
        flags[LETTERS] = _letters(flags, stages)
    flags |= {name: str(size) for name, size in layout.items() if name in flags}
    in_run = ("save",) if "finetune" in flags else ("save", "load")
    flags |= {name: str(run / ("run" if name in in_run else name)) for name in PATHS if name in flags}
    flags |= {name: str(size) for name, size in _sizes(flags, stages).items() if name in flags}
    if "[" in flags.get(FREQUENCY, ""):  # a list of all layers, of which the first ones are dense
        flags[FREQUENCY] = f"([0]*1+[1]*{int(flags['num-layers']) - 1})"
    batch, replicas = _batch(flags), ranks // math.prod(layout[name] for name in DENSE)
    flags |= {name: value for name, value in _times(flags, batch, replicas).items() if name in flags}
    flags |= {name: str(files / file) for name, file in FILES.items() if name in flags}
    if "distributed-backend" in flags:
        flags["distributed-backend"] = "gloo"
    if "fp16" in flags:  # the first steps of a long run look for it
        flags.setdefault("initial-loss-scale", "4096")
    return [word for name, value in flags.items() for word in (f"--{name}", *shlex.split(value))]


def _layout(flags: Mapping[str, str], ranks: int, replicas: int) -> dict[str, int]:
    """Return the size of each axis. Context parallelism, whose ways of communication need their size, is cut last."""
    layout = {name: int(flags.get(name, 1)) for name in (*DENSE, *SPARSE)}
    for names, most in ((DENSE, ranks // replicas), (SPARSE, ranks)):
        if names is SPARSE and SPARSE[-1] not in flags:
            layout[SPARSE[-1]] = layout[DENSE[1]]
        while math.prod(layout[name] for name in names) > most:
            largest = max(names[:2], key=lambda name: layout[name])
            layout[largest if layout[largest] > 1 else names[2]] //= 2
    return layout


def _letters(flags: Mapping[str, str], ranks: int) -> str:
    """Return what each stage contains: of each letter one, of the first stages and the last, as many to a rank."""
    stages = ["".join(dict.fromkeys(stage)) for stage in stages_of_letters(flags[LETTERS])]
    kept = len(stages) * ranks // int(flags["pipeline-model-parallel-size"])
    return "|".join([*stages[: kept - 1], stages[-1]])


def _sizes(flags: Mapping[str, str], stages: int) -> dict[str, int]:
    """Return the sizes of the network, at two layers per pipeline rank, or more if stages or a pattern need them.

    A command with fewer layers keeps its own number. Groups have so many experts that the chosen groups have enough.
    """

    def of(name: str, default: int = 1) -> int:
        return int(flags.get(name, default))

    hidden, heads, length = of("hidden-size"), of("num-attention-heads"), of("seq-length")
    width, narrower = hidden // heads, HIDDEN / hidden
    layers = max(2 * stages, of("num-virtual-stages-per-pipeline-rank") * stages, of("linear-attention-freq"))
    chosen_of_group = math.ceil(of("moe-router-topk") / of("moe-router-group-topk"))
    return {
        "num-layers": _layers(flags, min(of("num-layers"), layers)),
        **dict.fromkeys(LINEAR, HIDDEN // HEADS),
        "num-layers-per-virtual-pipeline-stage": 1,
        "decoder-first-pipeline-num-layers": 1,
        "decoder-last-pipeline-num-layers": 1,
        "hidden-size": HIDDEN,
        "num-attention-heads": HEADS,
        "num-query-groups": max(HEADS * of("num-query-groups") // heads, 1),
        **{name: max(HIDDEN // HEADS * of(name) // width // 2 * 2, 2) for name in OF_HEADS},
        **{name: max(round(of(name) * narrower / 8) * 8, 8) for name in OF_HIDDEN},
        "num-experts": min(of("num-experts"), max(EXPERTS, of("moe-router-num-groups") * chosen_of_group)),
        "seq-length": LENGTH,
        "dsa-indexer-topk": LENGTH * of("dsa-indexer-topk") // length,
        "max-position-embeddings": LENGTH * of("max-position-embeddings", length) // length,
        "vocab-size": 255,
    }


def _layers(flags: Mapping[str, str], otherwise: int) -> int:
    if PATTERN in flags:
        return count_of_pattern(flags[PATTERN])
    return flags[LETTERS].count("t") if LETTERS in flags else otherwise


def _batch(flags: Mapping[str, str]) -> int:
    """Return the samples of a step: its micro-batches, at most 8, of one sample each."""
    return min(int(flags.get("global-batch-size", MICRO_BATCHES)) // int(flags["micro-batch-size"]), MICRO_BATCHES)


def _times(flags: Mapping[str, str], batch: int, replicas: int) -> dict[str, str]:
    """Return the sizes of batches, and of time in steps and samples."""
    few, tokens = max(batch // 4, replicas), batch * LENGTH
    return {
        "micro-batch-size": "1",
        "global-batch-size": str(batch),
        "rampup-batch-size": f"{few} {few} {2 * batch}",
        "step-batch-size-schedule": f"0:{few} {2 * tokens}:{batch}",
        **{name: str(ITERATIONS * (batch if name.endswith("samples") else 1)) for name in _TIME},
        **dict.fromkeys(_WARM_UP, "1" if "lr-warmup-init" in flags else "0"),
        "eval-iters": str(min(int(flags.get("eval-iters", 1)), 1)),
        "save-interval": str(ITERATIONS // 2),
        "save-retain-interval": str(ITERATIONS),
        "log-interval": "1",
        "num-workers": "0",
    }
