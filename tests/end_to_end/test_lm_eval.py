"""lm_eval gets the oracle's results from a checkpoint, under every layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layout_expected import one_thread
from tests.end_to_end.bytes_by_oracle import EOD, LLAMA, log_probabilities, next_scores, write_byte_tokenizer
from tests.end_to_end.runs import EVALUATE, ROOT, saved_weights
from tests.harness.close import assert_number_close
from tests.harness.job import Job
from tests.harness.lm_eval_tasks import CHOICES, MAX_NEW_TOKENS, NAMES, PROMPTS, STOP, TEXTS, write_tasks
from tests.harness.tool import run_tool
from tests.oracle import Weights

LENGTH = 48
Results = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tasks."""
    return write_tasks(tmp_path_factory.mktemp("lm_eval") / "tasks")


def offline(folder: Path) -> dict[str, str]:
    return {"HF_HOME": str(folder.parent / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def found(byte_llama: Path, folder: Path) -> Results:
    """Return the results of `lm_eval_run.py` on the first of two ranks; the other has found the same."""
    output = folder.parent / "results"
    command = [ROOT / "tests" / "end_to_end" / "lm_eval_run.py", byte_llama, folder, output, LENGTH]
    with Job(command, 2, folder.parent / "job", offline(folder)) as job:
        assert job.wait() == [0, 0], job.stderr(0) + job.stderr(1)
    first, second = (json.loads(Path(f"{output}.rank{rank}").read_text()) for rank in range(2))
    assert first["refusals"] == second["refusals"]
    assert all(first[layout]["drawn"] == second[layout]["drawn"] for layout in LAYOUTS)
    return dict(first)


LAYOUTS = ("alone", "dp2", "tp2", "pp2")


@dataclass(frozen=True)
class Expected:
    """Results by the oracle."""

    choices: list[list[tuple[float, bool]]]
    """Per question and choice: the log-probability, and whether each of its bytes is the most likely."""
    texts: list[float]
    prompts: list[str]
    unprompted: str
    bare: list[float]
    """Log-probabilities of choices after nothing, and after spaces, which are then predicted with them."""


@pytest.fixture(scope="module")
def expected(byte_llama: Path) -> Expected:
    weights = saved_weights(byte_llama / "iter_0000001")
    with one_thread():
        return Expected(
            [
                [continued(weights, f"Q: {record['question']}\nA:", f" {choice}") for choice in record["choices"]]
                for record in CHOICES
            ],
            [whole(weights, record["text"]) for record in TEXTS],
            [written(weights, record["prompt"]) for record in PROMPTS],
            written(weights, ""),
            [whole(weights, text) for text in ("a choice", "  a choice")],
        )


def continued(weights: Weights, context: str, continuation: str) -> tuple[float, bool]:
    tokens = [*context.encode(), *continuation.encode()][-LENGTH - 1 :]
    scores = next_scores(LLAMA, weights, tokens[:-1])
    places = range(len(tokens) - len(continuation.encode()), len(tokens))
    total = sum(scores[place - 1, tokens[place]].item() for place in places)
    return total, all(scores[place - 1].argmax() == tokens[place] for place in places)


def whole(weights: Weights, text: str) -> float:
    return sum(log_probabilities(LLAMA, weights, text, LENGTH, LENGTH))


def written(weights: Weights, context: str) -> str:
    tokens, new = list(context.encode()) or [EOD], bytearray()
    tokens = tokens[-LENGTH + MAX_NEW_TOKENS :]
    while len(new) < MAX_NEW_TOKENS and (token := int(next_scores(LLAMA, weights, tokens)[-1].argmax())) != EOD:
        tokens.append(token)
        new.append(token)
    return new.decode(errors="replace").split(STOP)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_choices(layout: str, found: Results, expected: Expected) -> None:
    right = right_by_length = 0
    for record, answers, scores in zip(CHOICES, found[layout]["local_choices"], expected.choices, strict=True):
        for [[score, greedy]], (total, likeliest) in zip(answers, scores, strict=True):
            assert_number_close(score, total)
            assert greedy == likeliest
        totals = [total for total, _ in scores]
        by_length = [total / len(choice) for total, choice in zip(totals, record["choices"], strict=True)]
        right += totals.index(max(totals)) == record["answer"]
        right_by_length += by_length.index(max(by_length)) == record["answer"]
    figures = found[layout]["results"]["local_choices"]
    assert figures["acc,none"] == right / len(CHOICES)
    assert figures["acc_norm,none"] == right_by_length / len(CHOICES)
    for [score, _], total in zip(found[layout]["bare"], expected.bare, strict=True):
        assert_number_close(score, total)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_perplexity_of_texts(layout: str, found: Results, expected: Expected) -> None:
    for [[score]], total in zip(found[layout]["local_texts"], expected.texts, strict=True):
        assert_number_close(score, total)
    count = sum(len(record["text"].encode()) for record in TEXTS)
    bits = found[layout]["results"]["local_texts"]["bits_per_byte,none"]
    assert_number_close(bits, -sum(expected.texts) / count / math.log(2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written(layout: str, found: Results, expected: Expected) -> None:
    assert len(set(expected.prompts)) == len(PROMPTS)  # otherwise their order would not show
    assert [answer for [[answer]] in found[layout]["local_prompts"]] == expected.prompts
    assert found[layout]["unprompted"] == [expected.unprompted]
    exact = [text == record["answer"] for text, record in zip(expected.prompts, PROMPTS, strict=True)]
    assert found[layout]["results"]["local_prompts"]["exact_match,none"] == sum(exact) / len(exact)


def test_what_is_drawn_does_not_depend_on_the_layout(found: Results) -> None:
    drawn = found["alone"]["drawn"]
    assert all(found[layout]["drawn"] == drawn for layout in LAYOUTS)
    assert len({drawn[0], drawn[1], drawn[4]}) == 3  # of one prompt


def test_windows_are_those_of_lm_evals_own_models(found: Results) -> None:
    assert found["windows"]


def test_texts_begin_as_the_tokenizers_template_says(found: Results) -> None:
    assert found["template"] == {"prefix": 0, "whole": [[0, 3, 4], [0, 3, 4], [0]], "part": [3, 4]}


REFUSALS = {
    "unknown": "--tasks local_choises: there is no such task: did you mean local_choices",
    "folder": "none is not a folder",
    "broken": "--tasks broken cannot be loaded: ",
    "disagreement": "rank 1 has other requests to the model than rank 0",
    "long": f"a continuation of {LENGTH + 1} tokens, but there can be 1 to {LENGTH} (--seq-length)",
    "empty": "a continuation of 0 tokens",
    "room": f"lets the model write {LENGTH} tokens (max_gen_toks), which leaves no room",
    "option": "a task generates with num_beams, which megalite does not support",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_asked_is_refused(what: str, found: Results) -> None:
    assert REFUSALS[what] in found["refusals"][what]


@pytest.mark.wide  # imports lm_eval again
def test_the_command_shows_and_writes_the_results(
    byte_llama: Path, folder: Path, found: Results, tmp_path: Path, spawn: Callable[..., Job]
) -> None:
    command = [
        EVALUATE,
        "--load",
        byte_llama,
        "--tasks",
        ",".join(NAMES),
        "--include-path",
        folder,
        "--seq-length",
        LENGTH,
    ]
    job = spawn([*command, "--output", tmp_path / "out.json"], 1, **offline(folder))
    assert job.wait() == [0], job.stderr(0)
    results = json.loads((tmp_path / "out.json").read_text())["tasks"]["results"]
    for name in NAMES:
        expected = found["alone"]["results"][name]
        assert {key: results[name][key] for key in expected if "stderr" not in key} == {
            key: value for key, value in expected.items() if "stderr" not in key
        }
    for name in ("local_choices", "local_texts", "bits_per_byte"):
        assert name in job.stdout(0)


@pytest.mark.wide  # imports lm_eval again
def test_what_was_exported_is_told_apart_by_nothing(
    byte_llama: Path, folder: Path, found: Results, tmp_path: Path, spawn: Callable[..., Job]
) -> None:
    """lm_eval's own model of an exported Hugging Face folder gives the same results as the checkpoint."""
    exported = tmp_path / "exported"
    write_byte_tokenizer(tmp_path / "tokenizer")
    flags = ["--loader", "megalite", "--saver", "hf", "--load-dir", byte_llama, "--save-dir", exported]
    result = run_tool("convert", *flags, "--tokenizer-model", tmp_path / "tokenizer")
    assert result.code == 0, result.stderr
    script = ROOT / "tests" / "end_to_end" / "lm_eval_exported.py"
    job = spawn([script, exported, folder, tmp_path / "results", LENGTH], 1, **offline(folder))
    assert job.wait() == [0], job.stderr(0)
    theirs, ours = json.loads((tmp_path / "results").read_text()), found["alone"]
    for name in ("local_choices", "local_texts"):
        for [answer], [expected] in zip(flat(theirs[name]), flat(ours[name]), strict=True):
            score, total = (each if isinstance(each, float) else each[0] for each in (answer, expected))
            assert_number_close(score, total, relative=1e-6)  # transformers' norms are in fp32 whatever the weights
    assert theirs["local_prompts"] == ours["local_prompts"]
    for figure in ("acc,none", "acc_norm,none"):
        assert theirs["results"]["local_choices"][figure] == ours["results"]["local_choices"][figure]


def flat(samples: list[list[Any]]) -> list[Any]:
    """Return the answers to all requests."""
    return [answer for answers in samples for answer in answers]
