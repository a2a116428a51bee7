"""Tasks of lm_eval by name, and what a model makes of them."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigurationError, DataError
from megalite.inference.lm_eval_adapter import MegaliteLM

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")
"""Fields of lm_eval's results that a file keeps."""


@dataclass(frozen=True)
class Tasks:
    """Tasks and groups, loaded, and what knows where they come from."""

    manager: TaskManager
    loaded: list[Any]


def load_tasks(names: Sequence[str], include_path: str | None) -> Tasks:
    """The tasks and groups of these names, or patterns, with their data.

    `include_path`: a folder of one's own tasks. Where all are there, lm_eval's own 14,000, whose descriptions take
    seconds to read, are left out.
    Raises ConfigurationError for an unknown name, DataError if a task cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigurationError(f"--include-path {include_path} is no folder")
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=include_path)
    found = {name: manager.match_tasks([name]) for name in names}
    if unknown := next((name for name, matches in found.items() if not matches), None):
        near = difflib.get_close_matches(unknown, manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists what there is"
        raise ConfigurationError(f"--tasks {unknown}: there is no such task: {hint}")
    chosen = sorted({name for matches in found.values() for name in matches})
    try:
        loaded = manager.load(chosen)
    except Exception as error:  # whatever a task's own code and data raise
        raise DataError(f"--tasks {', '.join(chosen)} cannot be loaded: {type(error).__name__}: {error}") from error
    groups = {name: group for name, group in loaded.get("groups", {}).items() if name in chosen}
    grouped = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    return Tasks(manager, [*groups.values(), *(task for name, task in loaded["tasks"].items() if name not in grouped)])


def evaluate_tasks(model: MegaliteLM, tasks: Tasks, *, num_fewshot: int | None, limit: float | None) -> dict[str, Any]:
    """lm_eval's results for tasks that were loaded, without the samples; on ranks other than the first of a machine
    there are none.

    All ranks call it.
    """
    from lm_eval import simple_evaluate

    if model.network.mesh.rank:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results = simple_evaluate(
        model=model,
        tasks=tasks.loaded,
        task_manager=tasks.manager,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=model.micro_batch_size,
        log_samples=False,
    )
    return {name: results[name] for name in KEPT if name in results} if results else {}


def table(results: dict[str, Any]) -> str:
    """The results as lm_eval shows them."""
    from lm_eval.utils import make_table

    columns = [column for column in ("results", "groups") if results.get(column)]
    return "\n".join(make_table(results, column) for column in columns)
