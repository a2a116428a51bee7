"""AdamW (arXiv:1711.05101) and SGD with momentum: rules that look at each element by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import ParameterGroup, Run


class TorchRule:
    """By torch's fused kernels, for state of the master weights' dtype."""

    def __init__(self, runs: Sequence[Run], config: OptimizerConfig) -> None:
        self._runs = runs
        self._masters = [run.master.detach().requires_grad_() for run in runs]  # views that torch may call parameters
        members: dict[ParameterGroup, list[torch.Tensor]] = {}
        for run, master in zip(runs, self._masters, strict=True):
            members.setdefault(run.group, []).append(master)
        groups = [{"params": masters, "kind": group} for group, masters in members.items()]
        self._torch: torch.optim.Optimizer | None = None
        self._steps: list[torch.Tensor] = []
        if not groups:
            return
        if config.optimizer == "sgd":
            self._torch = torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            self._torch = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
            self._steps = [torch.zeros((), dtype=torch.float32, device=master.device) for master in self._masters]
        for run, master in zip(runs, self._masters, strict=True):
            self._torch.state[master] = dict(run.state)
        for master, steps in zip(self._masters, self._steps, strict=bool(self._steps)):
            self._torch.state[master]["step"] = steps

    def update(self, rates: Rates, step: int) -> None:
        if self._torch is None:  # a shard may hold matrices alone
            return
        for group in self._torch.param_groups:
            kind: ParameterGroup = group["kind"]
            group["lr"], group["weight_decay"] = kind.learning_rate(rates), kind.weight_decay(rates)
        for steps in self._steps:
            steps.fill_(step - 1)
        for run, master in zip(self._runs, self._masters, strict=True):
            master.grad = run.gradients.to(master.dtype)
        self._torch.step()
        for master in self._masters:
            master.grad = None
