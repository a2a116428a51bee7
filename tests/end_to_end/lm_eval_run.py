"""Evaluation of a checkpoint with lm_eval on two ranks and several layouts: `lm_eval_run.py RUN TASKS OUTPUT LENGTH`.

It is a separate script, because lm_eval's imports take seconds and hundreds of megabytes, and no other test needs them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.evaluator
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from megalite.config import ParallelConfig
from megalite.data.tokenizers.huggingface import load_tokenizer_json
from megalite.errors import MegaliteError
from megalite.inference import lm_eval_adapter
from megalite.inference.lm_eval_adapter import MegaliteLM, load_tasks
from megalite.inference.loading import load_for_generation
from megalite.inference.network import Network
from megalite.inference.scoring import sliding_windows
from megalite.lifecycle.launch import joined
from megalite.parallel.mesh import ParallelMesh
from megalite.process.place import Place, place_from_environment
from tests.harness import lm_eval_tasks as local
from tests.harness.template_tokenizer import write_template_tokenizer

DRAWN = {"do_sample": True, "temperature": 1.0, "top_k": 40, "max_gen_toks": 6, "until": []}


def evaluated(model: MegaliteLM, include_path: str) -> dict[str, Any]:
    """Return lm_eval's results for each task and each request, and the model's samples."""
    manager = TaskManager(include_path=include_path, include_defaults=False)
    results = lm_eval.simple_evaluate(model=model, tasks=list(local.NAMES), task_manager=manager, bootstrap_iters=0)
    answers: dict[str, Any] = {
        "drawn": model.generate_until([request(f"{n}", DRAWN) for n in (1, 1, 22, 333, 1)]),
        "unprompted": model.generate_until([request("", {"max_gen_toks": local.MAX_NEW_TOKENS, "until": local.STOP})]),
        "bare": model.loglikelihood([request(context, "a choice") for context in ("", "  ")]),
    }
    if results:  # present only on the first rank of a machine
        answers |= {"results": results["results"]}
        answers |= {name: [sample["resps"] for sample in results["samples"][name]] for name in local.NAMES}
    return answers


def request(*arguments: Any) -> Instance:
    return Instance("generate_until", {}, arguments, 0)


def encoded_by_a_template(network: Network) -> dict[str, Any]:
    """Return texts as tokens of a vocabulary that adds tokens before a document."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer_json(str(write_template_tokenizer(Path(folder))), True, "auto")
    model = MegaliteLM(network, tokenizer, max_length=8)
    return {
        "prefix": model.prefix_token_id,
        "whole": [model.tok_encode(text) for text in ("a b", "<s> a b", "")],
        "part": model.tok_encode("a b", add_special_tokens=False),
    }


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the user error that a call raises."""
    try:
        function(*arguments)
    except MegaliteError as error:
        return str(error)
    return "nothing is wrong"


def refusals(model: MegaliteLM, include_path: str, rank: int) -> dict[str, str]:
    """Return the errors for requests that are not supported."""

    class FewTasks(TaskManager):  # lm_eval's own 14,000 would take seconds
        def __init__(self, include_path: str | None = None, include_defaults: bool = True) -> None:
            super().__init__(include_path=include_path, include_defaults=False)

    lm_eval_adapter.TaskManager = FewTasks  # type: ignore[misc]
    return {
        "unknown": refusal(load_tasks, ["local_choises"], include_path),
        "folder": refusal(load_tasks, ["local_texts"], f"{include_path}/none"),
        "broken": refusal(load_tasks, [local.BROKEN], include_path),
        "disagreement": refusal(model.loglikelihood, [request("a", f"rank {rank}")]),
        "long": refusal(model.loglikelihood, [request("a", "b" * (model.max_length + 1))]),
        "empty": refusal(model.loglikelihood, [request("a", "")]),
        "room": refusal(model.generate_until, [request("a", {"max_gen_toks": model.max_length})]),
        "option": refusal(model.generate_until, [request("a", {"max_gen_toks": 2, "num_beams": 4})]),
    }


def windows_agree() -> bool:
    """Check that our windows, with and without overlap, are those of lm_eval's own models."""
    for size in range(12):
        for length in range(1, 7):
            for stride in range(1, length + 1):
                ours = sliding_windows(np.arange(size), [99], length, stride)
                theirs = get_rolling_token_windows(list(range(size)), 99, length, length - stride + 1)
                split = [(w.tokens[:-1].tolist(), w.tokens[-w.counted :].tolist()) for w in ours]
                if split != list(theirs):
                    return False
    return True


def main(copies: ParallelMesh, place: Place) -> None:
    """Write the results of this rank."""
    run, include_path, output, length = sys.argv[1:]
    split = {"rank": place.rank, "world_size": place.world_size}
    meshes = {
        "alone": ParallelMesh(),
        "dp2": copies,
        "tp2": ParallelMesh(**split, tensor_parallel_size=2),
        "pp2": ParallelMesh(**split, pipeline_parallel_size=2),
    }
    lm_eval.evaluator.add_env_info = lambda results: None  # takes a second each time
    found: dict[str, Any] = {"windows": windows_agree()}
    for name, mesh in meshes.items():
        network, tokenizer, ends = load_for_generation(run, mesh)
        model = MegaliteLM(network, tokenizer, ends, max_length=int(length), micro_batch_size=2)
        found[name] = evaluated(model, include_path)
    found["template"] = encoded_by_a_template(network)
    found["refusals"] = refusals(model, include_path, place.rank)
    Path(f"{output}.rank{place.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    place = place_from_environment()
    with joined(ParallelConfig(), place, "") as copies:
        main(copies, place)
