"""Verify a step of any trainer: what should have come out, and the first tensor that differs.

    megalite-verify --command train.sh --checkpoint ckpt/iter_0000100 --trace trace
    megalite-verify --command "torchrun ... pretrain_gpt.py ..." --checkpoint ckpt --metrics log.txt
    megalite-verify --command train.sh --checkpoint ckpt/iter_0000100 --next ckpt/iter_0000101
    megalite-verify --demo

The network of the command is computed in fp64 from the checkpoint, on this machine, over the very batch; beside it in
the run's precision with several orders of summation, which tells how far rounding goes. Traces are those of
megalite_trace, of Megatron-LM (--save-activations-interval, --save-wgrads-interval, --save-dgrads-interval), of
torchtitan (rank_N_activations.log), of SGLang's dumper and of msprobe (dump.json). Nothing of a command is executed.
Exit codes: 0 if nothing differs by more than rounding explains, 1 if something does, 2 if nothing could be compared,
64 for wrong flags, 93 for files that cannot be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.atomic_files import require_output, write_atomically
from megalite.config.fields import PositiveInt
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import ConfigurationError
from megalite.extras.translation.commands.translate import one_by_one, variables
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say

if TYPE_CHECKING:
    from megalite.conversion.opened import OpenedModel
    from megalite.extras.verify.command import Command
    from megalite.extras.verify.trace import Trace
    from megalite.extras.verify.verdict import Verdict

_SHOWN = 8
"""Maximum number of notes, and of reasons why something was not compared."""


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    command: str | None = None
    """The run's command: a launch script, or the command itself as one text."""
    set: tuple[str, ...] = ()
    """NAME=VALUE ...: variables of the script."""
    ranks: PositiveInt | None = None
    """Number of ranks, if the command does not say it."""
    checkpoint: str | None = None
    """The weights before the step: of Megatron-LM, Hugging Face, torch.distributed.checkpoint or megalite; unset: those
    that megalite draws, for a trace of the first step of a run of its own."""
    trace: str | None = None
    """Folder of the trace of a step."""
    step: PositiveInt | None = None
    """Number of the step, from 1, if the trace has several or does not say it."""
    against: str | None = None
    """Folder of another trace of the same step, which is verified, too."""
    metrics: str | None = None
    """Log of the first steps from the checkpoint on, whose losses, norms and rates are verified."""
    next: str | None = None
    """Checkpoint after one step from the first, which is verified to follow from it."""
    samples: bool = False
    """Verify that the batch of the trace is the one that the data flags give."""
    bisect: bool = False
    """Propose which flags to turn off next."""
    micro_batches: PositiveInt | None = None
    """Replay at most the last so many micro-batches of each rank; sums over the step are then left out."""
    json: str | None = None
    """File for the result as JSON; - prints it."""
    page: str | None = None
    """File for the page with pictures (HTML)."""
    demo: bool = False
    """Show a silent bug, found."""


def main() -> None:
    """Parse the flags, verify, and print the verdict."""
    arguments = parse_tool_arguments(Arguments, __doc__ or "", one_by_one(sys.argv[1:]), repeated=True)
    if arguments.demo:
        from megalite.extras.verify.demo import demo

        sys.exit(demo(arguments.page, partial(_show, arguments)))
    from megalite.extras.verify.replay import keep_freed_memory

    keep_freed_memory()
    for flag, file in (("--json", arguments.json), ("--page", arguments.page)):
        if file not in (None, "-"):
            require_output(flag, file)
    found = []
    for title, verdict in verdicts(arguments):
        found.append((title, verdict))
        _show(arguments, title, verdict)
    if arguments.json is not None:
        text = json.dumps({title: verdict.as_json() for title, verdict in found}, indent=1)
        if arguments.json == "-":
            say(text, exact=True)
        else:
            write_atomically(Path(arguments.json), f"{text}\n".encode())
    if arguments.page is not None:
        _write_page(arguments, found)
    sys.exit(max((verdict.exit_code for _, verdict in found), key=lambda code: (code == 1, code)))


def verdicts(arguments: Arguments) -> Iterator[tuple[str, Verdict]]:
    """Yield the result of each verification that is asked for, with its title."""
    asked = [arguments.trace, arguments.metrics, arguments.next]
    if not any(asked):
        raise ConfigurationError("nothing to verify: give --trace, --metrics or --next (or --demo)")
    if arguments.command is None:
        raise ConfigurationError("give --command: a launch script, or its text")
    if arguments.checkpoint is None and arguments.next is not None:
        raise ConfigurationError("--next needs --checkpoint: the weights before the step")
    for flag, value in (("--against", arguments.against), ("--samples", arguments.samples or None)):
        if value is not None and arguments.trace is None:
            raise ConfigurationError(f"{flag} compares with a trace: give --trace, too")
    from megalite.extras.verify.checks import verify_metrics, verify_step
    from megalite.extras.verify.command import read_command
    from megalite.extras.verify.readers.reading import read_trace

    checkpoint = None if arguments.checkpoint is None else Path(arguments.checkpoint)
    command = read_command(
        arguments.command, variables=variables(arguments.set), ranks=arguments.ranks, checkpoint=checkpoint
    )
    for folder in filter(None, (arguments.trace, arguments.against)):
        yield f"trace {folder}", _of_trace(arguments, command, checkpoint, Path(folder))
    trace = None if arguments.trace is None else Path(arguments.trace)
    if arguments.metrics is not None:
        yield f"metrics {arguments.metrics}", verify_metrics(command, checkpoint, Path(arguments.metrics), trace)
    if arguments.next is not None:
        assert checkpoint is not None  # as is required above
        batch = None if trace is None else read_trace(trace, arguments.step)
        yield f"step to {arguments.next}", verify_step(command, checkpoint, Path(arguments.next), batch)


def _of_trace(arguments: Arguments, command: Command, checkpoint: Path | None, folder: Path) -> Verdict:
    """Verify a trace, with what else was asked for of it."""
    from megalite.extras.verify.batches import from_data
    from megalite.extras.verify.checks import with_explained_figures, with_samples
    from megalite.extras.verify.next_flags import next_flags
    from megalite.extras.verify.readers.reading import read_trace
    from megalite.extras.verify.verification import verify

    trace = read_trace(folder, arguments.step)
    opened = _weights(command, checkpoint, trace)
    step = trace.step or arguments.step
    batches = None
    if not trace.batches:
        if step is None:
            raise ConfigurationError(f"{folder} has no batch and does not say its step: give --step, from 1")
        batches = from_data(command, step, arguments.micro_batches)
    found = verify(command, opened, trace, batches)
    found = with_explained_figures(found, command, checkpoint, trace)
    if arguments.samples:
        if step is None:
            raise ConfigurationError(f"--samples: {folder} does not say its step: give --step, from 1")
        found = with_samples(found, command, trace, step)
    if arguments.bisect and found.first is not None:
        found = replace(found, next_flags=next_flags(command, found.first))
    return found


def _weights(command: Command, checkpoint: Path | None, trace: Trace) -> OpenedModel:
    """Open the weights before the traced step."""
    from megalite.extras.verify.checkpoints import open_weights
    from megalite.extras.verify.initial_weights import initial_weights

    if checkpoint is not None:
        model = command.config.model
        if trace.program == "megalite":  # its tokenizer may add tokens to those of the flags
            model = replace(model, vocab_size=None)
        return open_weights(str(checkpoint), model)
    if (trace.program, trace.step) == ("megalite", 1):
        return initial_weights(command)
    raise ConfigurationError(
        "give --checkpoint, the weights before the step: flags tell only those of the first step of megalite"
    )


def _show(arguments: Arguments, title: str, verdict: Verdict) -> None:
    """Print a verdict: one line, then what supports it."""
    from megalite.extras.verify.verdict import shown_ratio

    say(f"{title}: {verdict.line}")
    for each in verdict.hypotheses[:5]:
        left = f"leaves {shown_ratio(each.ratio)} times rounding"
        say(f"  {'explains it' if each.explains else 'does not explain it'}: {each.text} ({left})")
    for figure in verdict.figures:
        say(
            f"  {figure.name}: {figure.recorded:.8g}, should be {figure.expected:.8g} +- {figure.tolerance:.1g}"
            f"{': differs' if figure.differs else ''}"
        )
    if verdict.judgements:
        ratios = sorted(each.ratio for each in verdict.judgements)
        say(
            f"  {len(ratios):,} tensors compared: the median is {shown_ratio(ratios[len(ratios) // 2])} times what "
            f"rounding explains, the largest {shown_ratio(ratios[-1])}"
        )
    for line in verdict.further:
        say(f"  {line}")
    for line in verdict.next_flags:
        say(f"  next: {line}")
    for reason, count in sorted(verdict.skipped.items(), key=lambda each: -each[1])[:_SHOWN]:
        say(f"  not compared ({count:,}): {reason}")
    for note in list(dict.fromkeys(verdict.notes))[:_SHOWN]:
        say(f"  {note}" if note.startswith("note") else f"  note: {note}")


def _write_page(arguments: Arguments, found: list[tuple[str, Verdict]]) -> None:
    """Write a page for each verdict, the second under the name with -2 behind it, and say where they are."""
    from megalite.extras.verify.page import write_page

    assert arguments.page is not None
    facts = [("command", arguments.command or ""), ("checkpoint", arguments.checkpoint or "")]
    for number, (title, verdict) in enumerate(found, start=1):
        path = Path(arguments.page)
        path = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        write_page(verdict, path, title=title, facts=facts)
        say(f"the page of {title} is {path}")


command = partial(run_tool, main)
