"""Adapter that lets lm_eval (EleutherAI's lm-evaluation-harness) evaluate a megalite checkpoint, on any layout.

    network, tokenizer, ends = load_for_generation(path, mesh)
    model = MegaliteLM(network, tokenizer, ends, max_length=2048)
    results = lm_eval.simple_evaluate(model=model, tasks=["arc_easy"])

Every rank runs lm_eval on the same requests. lm_eval sees only one process; the adapter divides the requests among the
data-parallel ranks. lm_eval returns the results on the first rank of each machine, and None on the others.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.interface import beginning_of_documents, begun
from megalite.errors import ConfigurationError, DataError
from megalite.inference.documents import context_of_documents
from megalite.inference.generation import generate
from megalite.inference.network import Network
from megalite.inference.sampling import Sampling
from megalite.inference.scoring import Score, Window, score_windows, sliding_windows
from megalite.parallel import collectives

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    raise ConfigurationError(f"tasks need lm_eval, 0.4.12 or later ({error}): pip install lm_eval") from error

KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")
"""Fields of lm_eval's results that are written to a file."""
TokenRequest = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as texts, then the tokens of each."""
Show = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]


class MegaliteLM(TemplateLM):  # type: ignore[misc]
    """Model and tokenizer, with the interface that lm_eval expects.

    Args:
        ends: tokens before which a generated text ends, beside the end of a document.
        max_length: number of tokens that the model reads at once. Of a longer request, only the end is read.
        micro_batch_size: number of sequences per forward.
        show: function for progress. It gets a total and a unit ("tokens" or "requests"), and returns a context manager
            whose value is called with the number of units that were completed.
    """

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer,
        ends: Collection[int] = (),
        *,
        max_length: int,
        micro_batch_size: int = 8,
        show: Show = lambda total, unit: nullcontext(lambda done: None),
    ) -> None:
        super().__init__()
        self.network, self._tokenizer, self._show = network, tokenizer, show
        self._ends = frozenset((*ends, tokenizer.eod))
        self.max_length, self.micro_batch_size = max_length, micro_batch_size
        self._beginning, self._context = beginning_of_documents(tokenizer), context_of_documents(tokenizer)

    @property
    def eot_token_id(self) -> int:
        """Token that ends a document."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """Token from which a text without context is predicted."""
        return self._context[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, after the tokens that the tokenizer's template puts before a document.

        The template's tokens are left out if `add_special_tokens` is False, or if the text already begins with them.
        Raises DataError if the text cannot be encoded.
        """
        try:
            tokens = self._tokenizer.encode(string)
        except ValueError as error:
            raise DataError(f"a task's text cannot be encoded: {error}: {string[:200]!r}") from error
        return tokens if add_special_tokens is False else begun(tokens, self._beginning)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return for each continuation its log-probability, and whether greedy generation would produce it."""
        self._check_agreement(requests)
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return scored

    def _loglikelihood_tokens(self, requests: list[TokenRequest], **_: Any) -> list[tuple[float, bool]]:
        windows = [self._window(*request) for request in requests]
        return [(score.log_probability, score.greedy) for score in self._scores(windows)]

    def _window(self, texts: tuple[str, str], context: list[int], continuation: list[int]) -> Window:
        if not 0 < len(continuation) <= self.max_length:
            raise ConfigurationError(
                f"a continuation of {len(continuation)} tokens, but there can be 1 to {self.max_length} "
                f"(--seq-length): {texts[1][:200]!r} after {texts[0][-200:]!r}"
            )
        tokens = [*(context or self._context), *continuation]
        return Window(np.array(tokens[-self.max_length - 1 :]), len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each text, read in windows of which only the last one overlaps another."""
        self._check_agreement(requests)
        length = self.max_length
        texts = [np.array(self.tok_encode(request.args[0], add_special_tokens=False), np.int64) for request in requests]
        windows = [list(sliding_windows(text, [self.prefix_token_id], length, length)) for text in texts]
        scores = iter(self._scores(list(chain.from_iterable(windows))))
        return [math.fsum(score.log_probability for score in islice(scores, len(each))) for each in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the text that the model generates after each context.

        It ends before the first of the request's stop texts, or at the end of a document.
        """
        self._check_agreement(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        written: dict[int, str] = {}
        with self._show(len(requests), "requests") as advance:
            for numbers in alike.values():
                contexts = [requests[number].args[0] for number in numbers]
                texts = self._write(contexts, requests[numbers[0]].args[1], advance)
                written |= zip(numbers, texts, strict=True)
        return [written[number] for number in range(len(requests))]

    def _write(self, contexts: Sequence[str], options: dict[str, Any], advance: Callable[[int], None]) -> list[str]:
        """Write a text for each context, up to the first stop text, and return all of them on every rank.

        Raises:
            ConfigurationError: the tokens to write leave no room for a prompt.
        """
        wanted = dict(normalize_gen_kwargs(options))
        stops = [stop for stop in wanted.pop("until") if stop]
        tokens, sampling = wanted.pop("max_gen_toks"), _sampling(wanted)
        if tokens >= self.max_length:
            raise ConfigurationError(
                f"a task lets the model write {tokens} tokens (max_gen_toks), which leaves no room for its prompt "
                f"among {self.max_length}: give a larger --seq-length"
            )
        # Random numbers depend on the number of a prompt. With sampling, each replica therefore generates all prompts.
        mesh = self.network.mesh
        copies, own = (1, 0) if sampling.temperature else (mesh.size("dp"), mesh.coordinate("dp"))
        prompts = [self.tok_encode(context)[tokens - self.max_length :] or self._context for context in contexts]
        prompts = prompts[own::copies]
        texts, begins = [""] * len(prompts), [len(self._tokenizer.decode(prompt)) for prompt in prompts]

        def ended(index: int, tokens: Sequence[int]) -> bool:
            text = self._tokenizer.decode(tokens)[begins[index] :]
            ends = [place for stop in stops if (place := text.find(stop)) >= 0]
            texts[index] = text[: min(ends)] if ends else text
            return bool(ends)

        for _, event in generate(
            self.network,
            prompts,
            max_new_tokens=tokens,
            ends=self._ends,
            sampling=sampling,
            batch_size=self.micro_batch_size,
            stop=ended,
            vocab_size=self._tokenizer.vocab_size,
        ):
            if isinstance(event, str):
                advance(1)
        if copies == 1:
            return texts
        every = collectives.all_gather_json(texts, mesh, "dp")
        advance(len(contexts) - len(texts))
        return [every[number % copies][number // copies] for number in range(len(contexts))]

    def _scores(self, windows: Sequence[Window]) -> list[Score]:
        with self._show(sum(window.counted for window in windows), "tokens") as advance:
            return score_windows(self.network, windows, self.micro_batch_size, advance)

    def _check_agreement(self, requests: Sequence[Instance]) -> None:
        """Raise ConfigurationError if the ranks have different requests, because their collectives would then hang."""
        mesh = self.network.mesh
        own = hashlib.sha256(repr([request.args for request in requests]).encode()).hexdigest()
        digests = collectives.all_gather_json(own, mesh)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise ConfigurationError(
                f"rank {other} has other requests to the model than rank 0: give all ranks the same tasks and data"
            )


def _sampling(options: dict[str, Any]) -> Sampling:
    """Return the sampling for a task's options, without those on length and end."""
    sampled = options.pop("do_sample")
    known = {name: options.pop(name) for name in ("temperature", "top_k", "top_p") if name in options}
    if options:
        raise ConfigurationError(f"a task generates with {', '.join(options)}, which megalite does not support")
    return Sampling(**known) if sampled else Sampling(temperature=0.0)


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks and groups, with the manager that loaded them."""

    manager: TaskManager
    loaded: list[Any]


def load_tasks(names: Sequence[str], include_path: str | None) -> Tasks:
    """Load the tasks and groups with these names or patterns, and their data.

    `include_path` is a folder with the user's tasks. If it has all named tasks, lm_eval's own 14,000 tasks are not
    indexed, because reading their descriptions takes seconds. Raises ConfigurationError for an unknown name, and
    DataError if a task cannot be loaded.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigurationError(f"--include-path {include_path} is not a folder")
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
    except Exception as error:  # a task's own code and data may raise any error
        raise DataError(f"--tasks {', '.join(chosen)} cannot be loaded: {type(error).__name__}: {error}") from error
    groups = {name: group for name, group in loaded.get("groups", {}).items() if name in chosen}
    grouped = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    return Tasks(manager, [*groups.values(), *(task for name, task in loaded["tasks"].items() if name not in grouped)])


def evaluate_tasks(model: MegaliteLM, tasks: Tasks, *, num_fewshot: int | None, limit: float | None) -> dict[str, Any]:
    """Return lm_eval's results for loaded tasks, without the samples. All ranks call it.

    On ranks other than the first of a machine, return {}.
    """
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
    """Return the results in the form of lm_eval's table."""
    columns = [column for column in ("results", "groups") if results.get(column)]
    return "\n".join(make_table(results, column) for column in columns)
