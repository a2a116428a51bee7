"""Show that other programs load an exported Hugging Face folder: transformers, vLLM and llama.cpp, if they are
installed.

    python tools/checkpoint/check_export.py --folder exported [--llama-cpp ~/llama.cpp]

Each must load all of it. For the same prompt, transformers and vLLM must generate the same tokens; llama.cpp's
converter must make a GGUF file of it, and its program, if it is built, must write a text from that.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import CheckpointError
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say
from megalite.process.programs import python, run

PROMPT = (5, 17, 33, 8, 21)
"""Prompt of small token ids, which every vocabulary has."""
NEW = 8
PROGRAMS = ("llama-completion", "llama-cli")


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    folder: str
    """The folder."""
    llama_cpp: str | None = None
    """Folder with llama.cpp's source, built or not."""


def main() -> None:
    """Load the folder with each installed program. Raises CheckpointError if one of them cannot load it."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    folder = Path(arguments.folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: it is not a Hugging Face folder")
    tokens = None
    if find_spec("transformers") is None:
        say("transformers: not installed (pip install transformers)")
    else:
        tokens = generate_with_transformers(folder)
        say(f"transformers: loads all of it, and continues with {tokens}")
    if find_spec("vllm") is None:
        say("vLLM: not installed (pip install vllm)")
    else:
        found = generate_with_vllm(folder)
        if tokens is not None and found != tokens:
            raise CheckpointError(f"vLLM continues with {found}, transformers with {tokens}")
        say(f"vLLM: loads it, and continues with {found}")
    if arguments.llama_cpp is None:
        say("llama.cpp: give --llama-cpp, the folder of its source (git clone https://github.com/ggml-org/llama.cpp)")
    else:
        say(f"llama.cpp: {run_llama_cpp(folder, Path(arguments.llama_cpp))}")


def generate_with_transformers(folder: Path) -> list[int]:
    """Return the most likely tokens, computed by transformers. Raises CheckpointError if weights do not match."""
    import torch

    from megalite.conversion.verification import load_with_transformers

    model, tokens = load_with_transformers(folder), torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NEW):
            likeliest = model(input_ids=tokens).logits[:, -1:].argmax(dim=-1)
            tokens = torch.cat([tokens, likeliest], dim=1)
    return tokens[0, len(PROMPT) :].tolist()


def generate_with_vllm(folder: Path) -> list[int]:
    """Return the most likely tokens, computed by vLLM."""
    import vllm  # type: ignore[import-not-found]

    model = vllm.LLM(str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    (answer,) = model.generate({"prompt_token_ids": list(PROMPT)}, sampling)
    return list(answer.outputs[0].token_ids)


def run_llama_cpp(folder: Path, source: Path) -> str:
    """Convert the folder with llama.cpp and run its program, if built; return a description of the result.

    Raises:
        CheckpointError: llama.cpp fails.
    """
    converter = source / "convert_hf_to_gguf.py"
    if not converter.is_file():
        raise CheckpointError(f"--llama-cpp {source} has no convert_hf_to_gguf.py")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.gguf"
        output_of(python(converter, folder, "--outfile", file, "--outtype", "f32"))
        size = file.stat().st_size
        program = next((path for name in PROGRAMS if (path := source / "build" / "bin" / name).is_file()), None)
        if program is None:
            return f"converted, {size:,} bytes; its program is not built (cmake -B build && cmake --build build)"
        text = output_of([str(program), "-m", str(file), "-p", "The", "-n", str(NEW), "--temp", "0", "-no-cnv"])
        return f"converted, {size:,} bytes; it writes {text.strip()!r}"


def output_of(command: list[str]) -> str:
    """Run a command and return its output. Raises CheckpointError if the command fails."""
    ended = run(command, capture_output=True, text=True)
    if ended.returncode:
        raise CheckpointError(f"{' '.join(command)} failed:\n{ended.stderr[-2000:]}")
    return ended.stdout


command = partial(run_tool, main)
