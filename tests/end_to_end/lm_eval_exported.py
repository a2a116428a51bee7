"""Evaluation of a Hugging Face folder with lm_eval's own model: `lm_eval_exported.py FOLDER TASKS OUTPUT LENGTH`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lm_eval
import lm_eval.evaluator
from lm_eval.tasks import TaskManager

from tests.harness import lm_eval_tasks as local


def main() -> None:
    """Write the model's answer to each request of lm_eval."""
    folder, include_path, output, length = sys.argv[1:]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # accelerate would make a process group of these
        os.environ.pop(name, None)
    lm_eval.evaluator.add_env_info = lambda results: None  # takes a second
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": folder, "dtype": "float64", "max_length": int(length)},
        device="cpu",
        batch_size=1,
        tasks=list(local.NAMES),
        task_manager=TaskManager(include_path=include_path, include_defaults=False),
        bootstrap_iters=0,
    )
    answers = {name: [sample["resps"] for sample in results["samples"][name]] for name in local.NAMES}
    Path(output).write_text(json.dumps({"results": results["results"], **answers}))


if __name__ == "__main__":
    main()
