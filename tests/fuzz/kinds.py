"""The kinds of input: a valid sample, how it is spoiled, what reads it, and what the format itself forbids."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import os
import random
import shutil
import struct
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.fuzz import devices, launches, messages, recordings, templates
from tests.fuzz.edits import (
    BYTES,
    INDEX,
    JSON,
    LINES,
    MANIFEST,
    SAFETENSORS,
    TORCH,
    YAML,
    Codec,
    Edit,
    draw_edit,
    hostile_value,
)
from tests.fuzz.programs import MOCK, SIZES, command, read_flags

Program = Callable[[], object]


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        prepare: steps, each in a process of its own, that write a valid sample into `in`, below a folder, and into
            `made` what edits may put in its place.
        program: what reads the sample in `in`, below a folder, once edits have spoiled it.
        codecs: the files to edit.
        draw: makes edits of its own, beside those of the files; given the folder of the sample.
        referee: says what the format forbids of an input that was accepted.
        streams: files that a user names on the command line and that may be pipes, and of any size.
        allowed: paths, below the folder, that the input itself names to be written to.
    """

    prepare: Sequence[Callable[[Path], object]]
    program: Callable[[Path, Sequence[Edit]], Program]
    codecs: Mapping[str, Codec]
    draw: Callable[[random.Random, Path], Edit | None] = lambda draw, folder: None
    referee: Callable[[Path], str | None] = lambda base: None
    streams: Sequence[str] = ()
    allowed: Callable[[Path, Sequence[Edit]], Sequence[Path]] = lambda base, edits: ()

    def edits(self, draw: random.Random, folder: Path) -> list[Edit]:
        """An input; mostly of one edit, which shows best what a reader makes of it."""
        found = []
        for _ in range(draw.choice([1, 1, 1, 1, 2, 2, 3, 6])):
            own = self.draw(draw, folder)
            if own is None:
                file = draw.choice(sorted(self.codecs))
                valid = (folder / "in" / file).read_bytes()
                own = draw_edit(draw, file, valid, self.codecs[file], regular=file in self.streams)
            found.append(own)
        return found


# ---------------------------------------------------------------------------------------------------- token files


def _write_lines(path: Path) -> None:
    texts = [f"{number} is a number, and so is {number * 7}. Größe: {'x' * number}" for number in range(40)]
    path.write_text("".join(json.dumps({"text": text, "meta": {"n": [1]}}) + "\n" for text in texts))


def _preprocess(base: Path, source: str, *flags: object) -> Program:
    out = ("--output-prefix", base / "out" / "data", "--workers", 1)
    return partial(command, "tools/preprocess_data.py", "--input", base / "in" / source, *out, *flags)


def _prepare_tokens(base: Path) -> None:
    _write_lines(base / "in" / "c.jsonl")
    _preprocess(base, "c.jsonl", "--append-eod", "--tokenizer-type", "ByteTokenizer")()


def _settle_tokens(base: Path) -> None:
    """Move what was made to where it is read."""
    for file in sorted((base / "out").iterdir()):
        file.rename(base / "in" / file.name)
    (base / "in" / "c.jsonl").unlink()


def _read_tokens(base: Path, _: Sequence[Edit]) -> Program:
    flags = f"--data-path {base}/in/data_text_document --tokenizer-type ByteTokenizer --split 1 --train-iters 8"
    return partial(read_flags, [*SIZES, *flags.split(), "--data-cache-path", str(base / "out" / "cache")], samples=32)


def _settle_mix(base: Path) -> None:
    """Write a schedule, and lists that one may name in place of its mappings."""
    prefix = str(base / "in" / "data_text_document")
    sources = {"web": {"path": prefix, "max_epochs": 40}}
    phases = [{"weights": {"web": 1.5}}, {"from": "400", "weights": {"web": 2}}]
    (base / "in" / "mix.yaml").write_text(json.dumps({"sources": sources, "phases": phases}))


def _read_mix(base: Path, _: Sequence[Edit]) -> Program:
    flags = f"--data-mix-schedule {base}/in/mix.yaml --tokenizer-type ByteTokenizer --split 1 --train-iters 8"
    return partial(read_flags, [*SIZES, *flags.split(), "--data-cache-path", str(base / "out" / "cache")], samples=32)


def wrong_index(base: Path) -> str | None:
    """Return the problem of a .idx, from the definition of the format alone; None if it is valid."""
    data = (base / "in" / "data_text_document.idx").read_bytes()
    size = (base / "in" / "data_text_document.bin").stat().st_size
    magic, version, code, sequences, boundaries = struct.unpack_from("<9sQBQQ", data)
    # The types of two bytes are 3 and 8.
    if (
        (magic, version) != (b"MMIDIDX\0\0", 1)
        or code not in (3, 8)
        or len(data) != 34 + 12 * sequences + 8 * boundaries
    ):
        return "the header"
    lengths = struct.unpack_from(f"<{sequences}i", data, 34)
    pointers = struct.unpack_from(f"<{sequences}q", data, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{boundaries}q", data, 34 + 12 * sequences)
    if min(lengths, default=0) < 0 or 2 * sum(lengths) != size:
        return "the lengths"
    if list(pointers) != [2 * end for end in accumulate((0, *lengths[:-1]))]:
        return "pointers that are not the sums of the lengths"
    if list(documents) != sorted(documents) or (documents[0], documents[-1]) != (0, sequences):
        return "the document boundaries"
    return None


# ---------------------------------------------------------------------------------------------------- checkpoints


def _prepare_run(base: Path) -> None:
    command("pretrain_gpt.py", *SIZES, *MOCK, "--train-iters", 2, "--save-interval", 1, "--save", base / "in" / "run")


def _resume(base: Path, _: Sequence[Edit]) -> Program:
    places = ("--load", base / "in" / "run", "--save", base / "out" / "run", "--train-iters", 3)
    return partial(command, "pretrain_gpt.py", *SIZES, *MOCK, *places)


def not_finite(base: Path) -> str | None:
    """Return the problem if a successful training has a loss that is not finite; else None."""
    path = base / "out" / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    finite = all(math.isfinite(line.get("lm_loss") or 0.0) for line in lines)
    return None if finite else "a loss that is no number"


def _convert(base: Path, loader: str, source: Path, saver: str) -> Program:
    flags = ("--loader", loader, "--saver", saver, "--load-dir", source, "--save-dir", base / "out" / "made")
    return partial(command, "tools/checkpoint/convert.py", *flags, "--workers", 1)


def _settle_hf(base: Path) -> None:
    (base / "out" / "made").rename(base / "in" / "hf")
    shutil.rmtree(base / "in" / "run")


def _read_hf(base: Path, _: Sequence[Edit]) -> Program:
    return _convert(base, "hf", base / "in" / "hf", "megalite")


def wrong_safetensors(base: Path) -> str | None:
    """Return the error of the format's own library for a file, or None."""
    import safetensors

    try:
        with safetensors.safe_open(base / "in" / "hf" / "model.safetensors", "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_slice(name).get_shape()
    except safetensors.SafetensorError as error:
        return f"a file that the safetensors library refuses: {str(error)[:60]}"
    return None


HF_KEYS = (
    "rope_scaling", "rope_theta", "sliding_window", "layer_types", "head_dim", "num_key_value_heads", "attention_bias",
    "mlp_bias", "dtype", "quantization_config", "auto_map", "architectures", "model_type", "num_hidden_layers",
    "hidden_size", "vocab_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    "tie_word_embeddings", "num_attention_heads", "rope_parameters", "initializer_range",
)  # fmt: skip
HF_VALUES = (
    '{"rope_type": "linear", "factor": 0}', '{"rope_type": "yarn", "factor": "x"}', '{"type": "llama3"}', '"gpt2"',
    '{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, '
    '"original_max_position_embeddings": 0}', '["full_attention"]', '["x"]', '"gemma3_text"', '"qwen2"', '"gpt_neox"',
)  # fmt: skip


def _draw_config(draw: random.Random, folder: Path) -> Edit | None:
    if draw.random() < 0.5:
        return None
    file = folder / "in" / "hf" / "config.json"
    key = draw.choice(HF_KEYS)
    value = json.loads(file.read_bytes()).get(key, "x")
    return ["hf/config.json", "set", [key], hostile_value(draw, value, HF_VALUES)]


# ---------------------------------------------------------------------------------------------------- Megatron-LM


def _prepare_megatron(base: Path) -> None:
    from argparse import Namespace

    import torch

    from megalite.config import ModelConfig
    from megalite.conversion.opened import logical_tensors
    from tests.harness import megatron_legacy

    model = ModelConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, max_position_embeddings=32,
        vocab_size=53, make_vocab_size_divisible_by=8, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    names = """num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels group_query_attention
        num_query_groups max_position_embeddings position_embedding_type rotary_base rotary_percent rotary_interleaved
        rotary_seq_len_interpolation_factor use_rope_scaling normalization norm_epsilon apply_layernorm_1p qk_layernorm
        swiglu squared_relu add_bias_linear add_qkv_bias make_vocab_size_divisible_by hidden_dropout attention_dropout
        untie_embeddings_and_output_weights vocab_size""".split()  # noqa: SIM905
    arguments = {name: getattr(model, name) for name in names} | {"bias_gelu_fusion": True, "seq_length": 32}
    weights = {name: torch.zeros(shape) for name, shape in logical_tensors(model).items()}
    state = {"args": Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 10}
    file = base / "in" / LEGACY
    file.parent.mkdir(parents=True)
    torch.save(state | {"model": megatron_legacy.whole(model, weights, padding=3)}, file)
    (base / "in" / "legacy" / "latest_checkpointed_iteration.txt").write_text("10")
    _write_program(base)
    _convert(base, "hf", base / "in" / "hf", "megatron")()


def _write_program(base: Path) -> None:
    import torch

    (base / "made").mkdir()
    torch.jit.script(_module()).save(base / "made" / "torchscript.pt")


def _module() -> Any:
    """A module that writes a file when it is loaded; its source has to lie in a file, as this one."""
    import torch

    class Writer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = 1

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y

        @torch.jit.export
        def __getstate__(self) -> int:
            return 1

        @torch.jit.export
        def __setstate__(self, state: int) -> None:
            written = torch.from_file("../outside/written", True, 8, dtype=torch.uint8)
            written.fill_(35)
            self.x = int(written.sum())
            self.training = False

    return Writer()


LEGACY = "legacy/iter_0000010/mp_rank_00/model_optim_rng.pt"
PICKLES = (
    "cos\nsystem\n(S'touch ../outside/ran'\ntR.",
    'c__builtin__\neval\n(S\'open("../outside/ran", "w")\'\ntR.',
    "ctorch\nfrom_file\n(S'../outside/ran'\nI01\nI8\ntR.",
    "(" * 5000,
    "\u0080\u0004.",
)


def _settle_megatron(base: Path) -> None:
    (base / "out" / "made").rename(base / "in" / "dist")
    shutil.rmtree(base / "in" / "hf")
    folder = next(path for path in (base / "in" / "dist").iterdir() if path.is_dir())
    folder.rename(folder.with_name("iter_0000010"))
    (base / "in" / "dist" / "latest_checkpointed_iteration.txt").write_text("10")


def _draw_megatron(draw: random.Random, folder: Path) -> Edit | None:
    if draw.random() < 0.75:
        return None
    file = draw.choice([LEGACY, "dist/iter_0000010/common.pt", "dist/iter_0000010/.metadata"])
    if draw.random() < 0.5:
        return [file, "archive", "torchscript.pt"]
    return [file, "text", draw.choice(PICKLES)]


def _read_megatron(base: Path, edits: Sequence[Edit]) -> Program:
    return _convert(base, "megatron", base / "in" / edits[0][0].partition("/")[0], "megalite")


# ---------------------------------------------------------------------------------------------------- pytorch_model.bin


BINS = ("hf/pytorch_model-1.bin", "hf/pytorch_model-2.bin")
"""An archive, and pickles as torch wrote them before 1.6."""
BIN_INDEX = "hf/pytorch_model.bin.index.json"
BIN_NAMES = (5, -1, 1.5, None, True, "", "a\nb", "x" * 3000, "\0", "lm_head.bias")


def _prepare_bins(base: Path) -> None:
    import torch
    from safetensors.torch import load_file

    safetensors = base / "in" / "hf" / "model.safetensors"
    weights = sorted(load_file(safetensors).items())
    files = {name: BINS[number % 2] for number, (name, _) in enumerate(weights)}
    for file in BINS:
        part = {name: values for name, values in weights if files[name] == file}
        torch.save(part, base / "in" / file, _use_new_zipfile_serialization=file == BINS[0])
    names = {name: Path(file).name for name, file in files.items()}
    (base / "in" / BIN_INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    safetensors.unlink()
    _write_program(base)


def _draw_bin(draw: random.Random, folder: Path) -> Edit | None:
    file, valid = draw.choice([(file, (folder / "in" / file).read_bytes()) for file in BINS])
    choice = draw.random()
    if choice < 0.05:
        return [file, "archive", "torchscript.pt"]
    if choice < 0.1:
        return [file, "text", draw.choice(PICKLES)]
    if choice < 0.25:
        return [file, "copy", [draw.choice(BIN_NAMES)], [draw.choice(sorted(TORCH.decode(valid)))]]
    # Most of a file is weights, of which any will do; the pickles stand in front of them.
    return [file, "flip", draw.randrange(8 * 3000)] if choice < 0.65 else None


# ---------------------------------------------------------------------------------------------------- configurations


def _prepare_yaml(base: Path) -> None:
    command("pretrain_gpt.py", *SIZES, *MOCK, "--train-iters", 1, "--save", base / "out" / "run")


def _settle_yaml(base: Path) -> None:
    import yaml

    config = yaml.safe_load((base / "out" / "run" / "config.yaml").read_text())
    config["checkpoint"]["save"] = "run"
    (base / "in" / "run.yaml").write_text(json.dumps(config))


def _read_yaml(base: Path, _: Sequence[Edit]) -> Program:
    return partial(read_flags, ["--config", str(base / "in" / "run.yaml")])


PATHS = ("save", "load", "metrics_path", "tensorboard_dir", "data_cache_path")
PATH_VALUES = ("", " ", ".", "x", "sub/x", "../outside/x", "../outside/secret", "\n", "a" * 300, "-1")


def _prepare_flags(base: Path) -> None:
    from megalite.config import RunConfig

    names = {
        each.name: str(each.type)
        for section in typing.get_type_hints(RunConfig).values()
        if dataclasses.is_dataclass(section)
        for each in dataclasses.fields(section)
    }
    (base / "made").mkdir()
    (base / "made" / "flags.json").write_text(json.dumps(names))
    (base / "in" / "argv").write_text(json.dumps([*SIZES, *MOCK, "--train-iters", "1"]))


def _draw_flags(draw: random.Random, folder: Path) -> Edit:
    names = json.loads((folder / "made" / "flags.json").read_text())
    if draw.random() < 0.15:
        known = [name for name in PATHS if name in names]
        return ["argv", "append", [_flag(draw.choice(known)), draw.choice(PATH_VALUES)]]
    given = json.loads((folder / "in" / "argv").read_text())
    numbers = [word for word in given if not word.startswith("--")]

    def value() -> str:
        raw = hostile_value(draw, draw.choice([*map(int, filter(str.isdecimal, numbers)), "x"]), ())
        text = str(json.loads(raw)) if raw.startswith('"') else raw
        # As they can come from a shell: bytes that are no UTF-8, and never a zero.
        return text.replace("\ud800", "\udcff").replace("\0", "")

    name = draw.choice([*names, *[word[2:] for word in given if word.startswith("--")]])
    return ["argv", "append", [_flag(name), *(value() for _ in range(draw.choice([0, 1, 1, 1, 1, 2])))]]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _path_flags(base: Path, edits: Sequence[Edit]) -> Sequence[Path]:
    """Return the paths in the flags of an input; empty if it has other flags, too."""
    flags = [edit[2] for edit in edits]
    if not all(flag[0] in map(_flag, PATHS) for flag in flags):
        return ()
    named = [value for flag in flags for value in flag[1:] if value.strip()]
    return [Path(os.path.normpath(base / "cwd" / value)) for value in named]


def _read_flags(base: Path, edits: Sequence[Edit]) -> Program:
    argv = json.loads((base / "in" / "argv").read_text())
    paths = [edit for edit in edits if edit[2][0] in map(_flag, PATHS)]
    # Where all else is as it was, the run is a short one: it shows what is written.
    return partial(command, "pretrain_gpt.py", *argv) if len(paths) == len(edits) else partial(read_flags, argv)


# ---------------------------------------------------------------------------------------------------- text


def _prepare_jsonl(base: Path) -> None:
    _write_lines(base / "in" / "c.jsonl")
    data = (base / "in" / "c.jsonl").read_bytes()
    (base / "in" / "c.jsonl.gz").write_bytes(gzip.compress(data, mtime=0))
    (base / "in" / "c.txt").write_bytes(data)
    import zstandard

    (base / "in" / "c.jsonl.zst").write_bytes(zstandard.compress(data))


def _read_jsonl(base: Path, edits: Sequence[Edit]) -> Program:
    return _preprocess(base, edits[0][0], "--tokenizer-type", "ByteTokenizer")


def _prepare_tokenizers(base: Path) -> None:
    from megalite.preprocessing.tokenizer_training import train_byte_level_bpe, train_tokenizer

    folder = base / "in"
    _write_lines(folder / "c.jsonl")
    train_byte_level_bpe([str(folder / "c.jsonl")], ["text"], str(folder / "bpe"), 300, 1)
    train_tokenizer([str(folder / "c.jsonl")], ["text"], str(folder / "m"), 300, "bpe", 1)
    model = json.loads((folder / "bpe" / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"]), ""]))
    (folder / "bpe" / "special_tokens_map.json").write_text('{"pad_token": {"content": "<|endoftext|>"}}')
    words = [bytes([byte]) for byte in range(256)] + [b"is", b"num", b"ber", b"  ", "größe".encode()]
    tokens = [(base64.b64encode(word).decode(), word.decode(errors="replace")) for word in words]
    entries = [{"rank": i, "token_bytes": token, "token_str": text} for i, (token, text) in enumerate(tokens)]
    (folder / "ranks.json").write_text(json.dumps(entries))
    (folder / "ranks.tiktoken").write_text("".join(f"{token} {i}\n" for i, (token, _) in enumerate(tokens)))


def _read_tokenizer(base: Path, edits: Sequence[Edit]) -> Program:
    folder, file = base / "in", edits[0][0]
    if file.startswith("bpe"):
        flags: tuple[object, ...] = ("HuggingFaceTokenizer", "--tokenizer-model", folder / "bpe")
    elif file.startswith("ranks"):
        flags = ("TikTokenizer", "--tokenizer-model", folder / file)
    elif file.startswith("m.model"):
        flags = ("SentencePieceTokenizer", "--tokenizer-model", folder / file)
    else:
        flags = ("GPT2BPETokenizer", "--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt")
    return _preprocess(base, "c.jsonl", "--tokenizer-type", *flags)


LONGER = ("--seq-length", "256", "--max-position-embeddings", "256")


def _prepare_chat(base: Path) -> None:
    talk = [{"role": role, "content": "1+1?"} for role in ("system", "user", "assistant", "user", "assistant")]
    (base / "in" / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 4)
    (base / "in" / "template.jinja").write_text(templates.VALID)


def _read_chat(base: Path, _: Sequence[Edit]) -> Program:
    flags = f"--data-path {base}/in/talk.jsonl --tokenizer-type ByteTokenizer --split 1 --train-iters 2 --sft"
    places = ("--chat-template", f"{base}/in/template.jinja", "--data-cache-path", f"{base}/out/cache")
    # Later flags hold: a conversation is longer than the sequences of the other kinds.
    return partial(read_flags, [*SIZES, *flags.split(), *places, *LONGER], samples=4)


def _draw_chat(draw: random.Random, _: Path) -> Edit | None:
    return ["template.jinja", "text", templates.draw_template(draw)] if draw.random() < 0.9 else None


TOKENS = (_prepare_tokens, _settle_tokens)
RUN = (_prepare_run,)
HF = (*RUN, lambda base: _convert(base, "megalite", base / "in" / "run", "hf")(), _settle_hf)
KINDS: Mapping[str, Kind] = {
    "indexed": Kind(
        TOKENS,
        _read_tokens,
        {"data_text_document.idx": INDEX, "data_text_document.bin": BYTES, "data_text_document.megalite.json": JSON},
        referee=wrong_index,
    ),
    "mix": Kind((*TOKENS, _settle_mix), _read_mix, {"mix.yaml": YAML}),
    "manifest": Kind(
        RUN,
        _resume,
        {
            "run/iter_0000002/manifest.json": MANIFEST,
            "run/latest_checkpointed_iteration.txt": BYTES,
        },
        referee=not_finite,
    ),
    "safetensors": Kind(HF, _read_hf, {"hf/model.safetensors": SAFETENSORS}, referee=wrong_safetensors),
    "config": Kind(HF, _read_hf, {"hf/config.json": JSON}, _draw_config),
    "megatron": Kind(
        (*HF, _prepare_megatron, _settle_megatron),
        _read_megatron,
        {
            LEGACY: TORCH,
            "dist/iter_0000010/common.pt": TORCH,
            "dist/iter_0000010/.metadata": BYTES,
            "legacy/latest_checkpointed_iteration.txt": BYTES,
        },
        _draw_megatron,
    ),
    "pickled": Kind((*HF, _prepare_bins), _read_hf, {BIN_INDEX: JSON, **dict.fromkeys(BINS, TORCH)}, _draw_bin),
    "yaml": Kind((_prepare_yaml, _settle_yaml), _read_yaml, {"run.yaml": YAML}),
    "flags": Kind((_prepare_flags,), _read_flags, {"argv": JSON}, _draw_flags, allowed=_path_flags),
    "jsonl": Kind(
        (_prepare_jsonl,),
        _read_jsonl,
        {"c.jsonl": LINES, "c.jsonl.gz": BYTES, "c.jsonl.zst": BYTES, "c.txt": BYTES},
        streams=("c.jsonl", "c.jsonl.gz", "c.jsonl.zst", "c.txt"),
    ),
    "tokenizer": Kind(
        (_prepare_tokenizers,),
        _read_tokenizer,
        {
            "bpe/tokenizer.json": JSON,
            "bpe/tokenizer_config.json": JSON,
            "bpe/special_tokens_map.json": JSON,
            "m.model": BYTES,
            "vocab.json": JSON,
            "merges.txt": BYTES,
            "ranks.json": JSON,
            "ranks.tiktoken": BYTES,
        },
    ),
    "chat": Kind(
        (_prepare_chat,),
        _read_chat,
        {"template.jinja": BYTES, "talk.jsonl": LINES},
        _draw_chat,
        streams=("talk.jsonl",),
    ),
    "devices": Kind((devices.prepare,), devices.read_devices, {"classes.toml": devices.TOML, "seconds.json": JSON}),
    "nodes": Kind(
        (devices.prepare,),
        devices.read_nodes,
        {"run/sick_nodes.jsonl": LINES, "run/ledger.jsonl": LINES},
        allowed=lambda base, edits: (base / "in" / "run" / "ledger.jsonl",),  # which is cut to the step
    ),
    "chaos": Kind((devices.prepare,), devices.read_chaos, {"schedule.json": JSON, "sites.toml": devices.TOML}),
    "launch": Kind((launches.prepare,), launches.program, launches.FILES, launches.draw),
    "traces": Kind((recordings.prepare,), recordings.program, recordings.FILES),
    "messages": Kind(messages.PREPARE, messages.program, dict.fromkeys(messages.FILES, LINES), messages.draw),
}
"""Kinds by the names that `make fuzz KIND=` takes."""
