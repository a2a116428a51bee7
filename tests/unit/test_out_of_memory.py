"""An error of memory that ran out says how much was asked for, and for what part of a run."""

from __future__ import annotations

import pytest

from megalite.lifecycle.out_of_memory import describe_out_of_memory, is_out_of_memory


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("training/builder.py", "model/gpt.py"), "for the weights"),
        (("training/builder.py", "optim/buckets.py"), "for the weights or their gradients"),
        (("training/builder.py", "optim/elementwise.py"), "for the optimizer's state"),
        (("pipeline/engine.py", "model/mlp.py"), "for the activations of a step"),
        (("checkpoint/loading.py",), "for a checkpoint"),
        (("run/run.py",), ": Unable"),
    ],
)
def test_the_part_of_a_run_is_told(files: tuple[str, ...], told: str) -> None:
    call = "raise MemoryError('Unable to allocate 3.50 GiB')"
    for file in reversed(files):  # each file's code executes that of the next one
        call = f"exec(compile({call!r}, '/site/megalite/{file}', 'exec'))"
    with pytest.raises(MemoryError) as raised:
        exec(call)
    assert is_out_of_memory(raised.value)
    first = describe_out_of_memory(raised.value).splitlines()[0]
    assert first.startswith("this machine is out of memory (3.5 GiB were asked for)")
    assert told in first


def test_other_errors_are_none() -> None:
    assert not is_out_of_memory(ValueError("can't allocate a name"))
