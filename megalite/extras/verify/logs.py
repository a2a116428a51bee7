"""Logs of training runs: losses, gradient norms and learning rates by step, each as exact as it was printed.

Read are megalite's metrics.jsonl, the lines that Megatron-LM and torchtitan print, JSON lines and CSV with the usual
names, and the log_history of Hugging Face's trainer_state.json.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from io import TextIOWrapper
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from megalite.errors import DataError
from megalite.small_files import open_regular, parse_json, read_small_file, reason

LOSS, NORM, RATE = "loss", "grad_norm", "learning_rate"
FIGURES = (LOSS, NORM, RATE)
_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("loss", "lm_loss", "train_loss", "train/loss", "training_loss", "ce_loss"), LOSS),
    **dict.fromkeys(
        ("loss_metrics/global_avg_loss", "train/lm_loss", "train/ce_loss", "lm-loss-training/lm_loss"), LOSS
    ),
    **dict.fromkeys(("grad_norm", "gradient_norm", "train/grad_norm", "grad-norm", "total_norm"), NORM),
    **dict.fromkeys(("lr", "learning_rate", "learning-rate", "train/lr", "train/learning_rate"), RATE),
    **dict.fromkeys(("loss_scale", "loss-scale"), "loss_scale"),
    **dict.fromkeys(("consumed_samples", "consumed_train_samples"), "consumed_samples"),
    **dict.fromkeys(("step", "iteration", "global_step", "train/global_step", "_step", "iter", "steps"), "step"),
    "skipped": "skipped",
}
"""Names of figures in files, and here."""
_MEGATRON = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|(.*)")
_OF_MEGATRON = {
    "consumed samples": "consumed_samples",
    "learning rate": RATE,
    "lm loss": LOSS,
    "loss scale": "loss_scale",
    "grad norm": NORM,
    "number of skipped iterations": "skipped",
}
_TORCHTITAN = re.compile(r"\bstep:\s*(\d+)\s+(.*\bloss:.*)")
_OF_TORCHTITAN = {"loss": LOSS, "grad_norm": NORM, "lr": RATE}
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d{1,3})?|nan|inf)"
_LONGEST_LINE, _MOST_ROWS = 2**20, 100_000
_EXACT_DIGITS, _LEAST_DIGITS = 7, 4
"""Significant digits from which on numbers are taken as not rounded, and which they are taken to have at least."""


@dataclass(frozen=True)
class Printed:
    """A number in a log."""

    value: float
    half_unit: float = 0.0
    """Half a unit of its last digit: how far its rounding may have moved it."""


@dataclass(frozen=True)
class Row:
    """Figures of one step, by the names of FIGURES and others.

    Attributes:
        windows: the steps that the loss is the mean of; several, if versions of the program differ in it.
        skipped: number of steps, since the row before, that have updated nothing.
    """

    step: int
    figures: Mapping[str, Printed]
    windows: tuple[range, ...]
    skipped: int = 0


@dataclass(frozen=True)
class Log:
    """Log of a run.

    Attributes:
        format: the kind of file, for messages.
        rows: in the order of steps; of a step that is there several times, the last one.
        rate_of_next: whether a learning rate is that of the next step, as programs print that set it before they log.
    """

    format: str
    rows: Sequence[Row]
    rate_of_next: bool = False


_Raw = tuple[int, Mapping[str, Printed]]


def read_log(path: Path) -> Log:
    """Read a log, at most its first 100,000 steps. Raises DataError if it cannot be read or has no figures."""
    try:
        found = _read(path)
    except (OSError, ValueError) as error:
        raise DataError(f"--metrics {path}: {reason(error)}") from error
    if not found.rows:
        raise DataError(
            f"--metrics {path} has no step with a loss, a gradient norm or a learning rate: expected metrics.jsonl, "
            "lines that Megatron-LM or torchtitan print, JSON lines, or CSV with a header"
        )
    return found


def _read(path: Path) -> Log:
    """Read a log by what its first lines look like."""
    for number, line in enumerate(_lines(path)):
        text = line.strip()
        if _MEGATRON.search(line):
            rows = _rows(_of_megatron(found) for each in _lines(path) if (found := _MEGATRON.search(each)))
            return Log("Megatron-LM's lines", _with_windows(rows, first_is_extra=True), rate_of_next=True)
        if _TORCHTITAN.search(_COLOR.sub("", line)):
            plain = (_COLOR.sub("", each) for each in _lines(path))
            rows = _rows(_of_torchtitan(found) for each in plain if (found := _TORCHTITAN.search(each)))
            return Log("torchtitan's lines", rows)
        if text.startswith('{"') or text == "{":
            if not (records := _records(_lines(path))):
                return _of_history(path)
            own = "iteration_time_s" in records[0]
            return Log("megalite's metrics" if own else "JSON lines", _rows(_of_records(records, exact=own)))
        columns = [name.strip().strip('"') for name in text.split(",")]
        if number < 10 and {"step", LOSS, NORM, RATE} & {_NAMES.get(name.lower(), "") for name in columns}:
            table = csv.DictReader(line for at, line in enumerate(_lines(path)) if at >= number)
            return Log("CSV", _rows(_of_records(list(islice(table, _MOST_ROWS)))))
    return Log("", ())


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a regular file; one that is too long comes in pieces."""
    with TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
        yield from iter(lambda: file.readline(_LONGEST_LINE), "")


def _printed(text: str) -> Printed | None:
    """Return a number as it was printed; None if the text is none."""
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int) or abs(exponent) > 400 or abs(number.adjusted()) > 300:
        return Printed(float(number)) if not number.is_finite() else None
    return Printed(float(number), 0.5 * 10.0**exponent)


def _named(pairs: Iterable[tuple[str, str]], names: Mapping[str, str]) -> dict[str, Printed]:
    """Return the figures that have a name here."""
    found = ((names[name], _printed(text)) for name, text in pairs if name in names)
    return {name: value for name, value in found if value is not None}


def _of_megatron(found: re.Match[str]) -> _Raw:
    pairs = (each.strip().rpartition(": ") for each in found[2].split("|"))
    return int(found[1]), _named(((name, text.strip()) for name, _, text in pairs), _OF_MEGATRON)


def _of_torchtitan(found: re.Match[str]) -> _Raw:
    pairs = re.findall(rf"(\w+):\s*({_NUMBER})", found[2])
    return int(found[1]), _named(pairs, _OF_TORCHTITAN)


def _records(lines: Iterable[str]) -> list[Mapping[str, Any]]:
    """Return the objects of JSON lines, without lines that are none."""
    found: list[Mapping[str, Any]] = []
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
        if len(found) >= _MOST_ROWS:
            break
    return found


def _of_history(path: Path) -> Log:
    """Read the log_history of a trainer_state.json. Its losses are means since the last row."""
    state = parse_json(read_small_file(path))
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ValueError("not JSON lines, and no log_history, as Hugging Face's trainer_state.json has")
    records = [each for each in history if isinstance(each, dict) and "train_runtime" not in each]
    return Log("Hugging Face's log_history", _with_windows(_rows(_of_records(records))), rate_of_next=True)


def _of_records(records: Sequence[Mapping[str, Any]], *, exact: bool = False) -> list[_Raw]:
    """Return figures by step from mappings. How exact a column is, its longest number tells, unless all are `exact`."""
    rows: list[tuple[int, dict[str, str]]] = []
    for record in records:
        texts: dict[str, str] = {}
        for name, value in record.items():
            known = _NAMES.get(str(name).strip().lower())
            if known is not None and known not in texts and value is not None:
                plain = int(value) if isinstance(value, bool) else value
                texts[known] = plain.strip().strip('"') if isinstance(plain, str) else json.dumps(plain)
        if (texts.get("step") or "").replace(".0", "").isdecimal() and len(texts) > 1:
            rows.append((int(float(texts["step"])), texts))
    found: list[dict[str, Printed]] = [
        {name: value for name, text in texts.items() if (value := _printed(text)) is not None} for _, texts in rows
    ]
    for name in FIGURES:
        column = _exactness(texts[name] for _, texts in rows if name in texts)
        for figures in found:
            if name in figures:
                figures[name] = Printed(figures[name].value) if exact else column(figures[name])
    return [(step, figures) for (step, _), figures in zip(rows, found, strict=True)]


def _exactness(texts: Iterable[str]) -> Callable[[Printed], Printed]:
    """Return the function that sets the half units of a column, from which zeros at the end are left out."""
    numbers = [Decimal(text.replace(",", "")).normalize() for text in texts if _printed(text)]
    numbers = [number for number in numbers if number.is_finite()]
    digits = max((len(number.as_tuple().digits) for number in numbers), default=0)
    places = max((-int(number.as_tuple().exponent) for number in numbers if number), default=0)

    def exact(printed: Printed) -> Printed:
        if digits >= _EXACT_DIGITS or not math.isfinite(printed.value):
            return Printed(printed.value)
        magnitude = math.floor(math.log10(abs(printed.value))) if printed.value else 0
        by_digits = 0.5 * 10.0 ** (magnitude + 1 - max(digits, _LEAST_DIGITS))
        return Printed(printed.value, max(by_digits, 0.5 * 10.0 ** -max(places, _LEAST_DIGITS)))

    return exact


def _rows(raw: Iterable[_Raw]) -> list[Row]:
    """Return the rows that have a figure, by step."""
    found: dict[int, Row] = {}
    for step, figures in islice(raw, _MOST_ROWS):
        if step > 0 and any(name in figures for name in FIGURES):
            skipped = figures["skipped"].value if "skipped" in figures else 0
            found[step] = Row(step, figures, (range(step, step + 1),), int(skipped))
    return [found[step] for step in sorted(found)]


def _with_windows(rows: Sequence[Row], *, first_is_extra: bool = False) -> list[Row]:
    """Return rows whose losses are means over the steps since the row before.

    `first_is_extra`: the first row is printed in addition, and in newer versions its step counts in the second row's
    mean, too.
    """
    found = list(rows[:1])
    for number, (before, row) in enumerate(pairwise(rows)):
        begins = [before.step + 1]
        if number == 0 and first_is_extra:
            begins.insert(0, before.step)
        found.append(replace(row, windows=tuple(range(begin, row.step + 1) for begin in begins)))
    return found
