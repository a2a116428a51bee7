"""Flags of offloading the optimizer and the parameters: what does not fit together is refused in one line."""

from __future__ import annotations

import pytest

from megalite.config import parse_arguments, resolve
from megalite.errors import ConfigurationError
from tests.end_to_end.runs import GPT2, MOCK

ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 1.5",
            "--optimizer-offload-fraction 1.5: must be from 0",
        ),
        ("--optimizer-offload-fraction 0.5", "--optimizer-offload-fraction needs --optimizer-cpu-offload"),
        ("--overlap-cpu-optimizer-d2h-h2d", "--overlap-cpu-optimizer-d2h-h2d needs --optimizer-cpu-offload"),
        ("--no-pin-cpu-grads", "--no-pin-cpu-grads needs --optimizer-cpu-offload"),
        ("--optimizer-cpu-offload --optimizer-backend apex", "apex updates on GPUs only"),
        ("--optimizer-cpu-offload --kernels triton", "--kernels triton"),
        ("--optimizer-cpu-offload --gradient-compression topk", "leave out --gradient-compression"),
        ("--parameter-offload --optimizer-cpu-offload", "--parameter-offload needs --data-parallel-sharding-strategy"),
        (f"--parameter-offload {ZERO3}", "needs --optimizer-cpu-offload with --optimizer-offload-fraction 1, not 0"),
        (
            f"--parameter-offload {ZERO3} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
            "--optimizer-offload-fraction 1, not 0.5",
        ),
    ],
)
def test_what_does_not_fit_is_refused(flags: str, message: str) -> None:
    argv = [*MOCK, *GPT2, *flags.split(), "--train-iters", "2"]
    with pytest.raises(ConfigurationError) as caught:
        resolve(parse_arguments([str(each) for each in argv]).config, 2)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_megatrons_flag_of_its_optimizer_is_already_so() -> None:
    argv = [*MOCK, *GPT2, "--train-iters", "2", "--optimizer-cpu-offload", "--use-torch-optimizer-for-cpu-offload"]
    parsed = parse_arguments([str(each) for each in argv])
    assert any("use-torch-optimizer-for-cpu-offload" in line for line in parsed.notes)
