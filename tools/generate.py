"""Write text with a trained model.

    python tools/generate.py --load run/small-llama --prompt "def main(" --temperature 0.8 --top-p 0.9

Under torchrun the model is split over all ranks (tensor parallelism), whatever layout it was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.tool_arguments import parse_tool_arguments
from megalite.training.failure import run_main


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    load: str
    """The run directory, or one checkpoint in it (iter_0000100)."""
    prompt: str
    """What the text begins with."""
    max_new_tokens: int = 100
    """Tokens to write at most; the end of a document, or of learned positions, ends the text before."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token each time."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probabilities reach p."""
    seed: int = 1234
    """The same seed gives the same text."""
    tokenizer_model: str | None = None
    """Where the tokenizer's file is now; unset: where it was when the model was trained."""


def main() -> int:
    """Load the newest checkpoint, split over the ranks there are, and stream text to the terminal."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")

    from megalite.errors import ConfigurationError
    from megalite.inference.sampling import Sampling

    if arguments.max_new_tokens < 0:
        raise ConfigurationError(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 0")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)

    from megalite.checkpoint import open_directory
    from megalite.checkpoint.directory import resolve
    from megalite.config import ParallelConfig
    from megalite.inference.generation import encode_prompt, generate, stream_text
    from megalite.inference.loading import load_for_generation
    from megalite.training.launch import join, leave
    from megalite.training.place import place_from_environment

    place = place_from_environment()
    mesh = join(ParallelConfig(tensor_model_parallel_size=place.world_size), place, repr(arguments))
    network, tokenizer = load_for_generation(resolve(open_directory(arguments.load)), mesh, arguments.tokenizer_model)
    prompt = encode_prompt(tokenizer, arguments.prompt)
    tokens = generate(network, prompt, max_new_tokens=arguments.max_new_tokens, eod=tokenizer.eod, sampling=sampling)
    for text in stream_text(tokenizer, prompt, tokens):
        if mesh.rank == 0:
            print(text, end="", flush=True)
    if mesh.rank == 0:
        print(flush=True)
    leave(mesh)
    return 0


if __name__ == "__main__":
    run_main(main)
