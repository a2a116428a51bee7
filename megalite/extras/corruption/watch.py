"""Search for silent corruption in a run: the checks that are due in a step, and what is said of their findings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NoReturn

from megalite.errors import ConfigurationError
from megalite.extras.corruption.consequences import Consequences, Finding, named
from megalite.extras.corruption.gradient_sync import GradientSync
from megalite.extras.corruption.replicas import Difference, SharedWeights
from megalite.extras.corruption.rerun import Judgement, Reruns, Result, judge
from megalite.parallel.collectives import all_gather_json
from megalite.process.host import host_name
from megalite.run.copies import Copies
from megalite.training.metrics import StepMetrics
from megalite.training.trainer import Trainer


class CorruptionWatch:
    """Checks of a trainer's steps. All methods are called by all ranks together."""

    def __init__(self, trainer: Trainer, copies: Copies | None = None) -> None:
        """Begin. `copies`: copies in memory of the run, if it has some.

        Raises ConfigurationError if gradients that are computed twice may differ without a fault.
        """
        config, mesh = trainer.config.corruption, trainer.mesh
        deterministic = mesh.device.type == "cpu" or trainer.config.training.deterministic_mode
        self._trainer, self._mesh = trainer, mesh
        self._hash_interval = config.check_weight_hash_across_dp_replicas_interval
        self._rerun_interval = config.rerun_on_replica_interval
        if self._rerun_interval is not None and not deterministic:
            raise ConfigurationError(
                "--rerun-on-replica-interval needs --deterministic-mode on GPUs: otherwise kernels may add in another "
                "order the second time, and the bits differ without a fault"
            )
        self._weights = SharedWeights(trainer.optimizer, mesh, deterministic=deterministic)
        self._reruns = None if self._rerun_interval is None else Reruns(trainer)
        self._consequences = Consequences(config, trainer.directory, mesh, copies)
        self._hosts: list[str] = all_gather_json(host_name(), mesh)
        # Those of the last checks before this start: a step after them may have gone wrong before it.
        self._agreed = last_checked(trainer.iteration, self._hash_interval)
        self._verified = last_checked(trainer.iteration, self._rerun_interval)
        self._consumed = trainer.consumed_samples
        if (interval := config.check_gradient_sync_interval) is not None:
            sums = GradientSync(trainer, interval, self._hosts, deterministic=deterministic)
            trainer.optimizer.before_update = partial(self._check_sums, sums)

    def step(self) -> StepMetrics:
        """Run a step of the trainer, with the checks that are due, before its update.

        Raises:
            SilentCorruptionError: a check has failed. Weights and state are those of the step before.
        """
        trainer, reruns = self._trainer, self._reruns
        number = trainer.iteration + 1
        self._consumed = trainer.consumed_samples
        compares = self._hash_interval is not None and number % self._hash_interval == 0
        before = self._weights.hashes() if compares else []
        if reruns is not None and self._rerun_interval is not None and number % self._rerun_interval == 0:
            others, _ = reruns.again(1, self._consumed)
            gradients, results = reruns.original()
            if judge([*results, *others]).kind != "agrees":
                self._fail(self._judge_again([*results, *others]), number)
            self._verified = trainer.iteration
        else:
            gradients = trainer.forward_backward()
        if compares:
            if differences := self._weights.differences(before):
                raise self._consequences.end(self._different(differences, number), self._hosts)
            self._agreed = trainer.iteration
        return trainer.update(gradients)

    def after_skip(self, report: str) -> str:
        """Compute the step that was skipped last again, on two replicas. Returns the report on it with the verdict.

        Raises:
            SilentCorruptionError: the replicas differ.
        """
        if self._reruns is None:
            return report
        own, finite = self._reruns.again(0, self._consumed)
        others, others_finite = self._reruns.again(1, self._consumed)
        if judge([*own, *others]).kind != "agrees":
            self._fail(self._judge_again([*own, *others]), self._trainer.iteration)
        if finite and others_finite:
            return f"{report}. On two replicas it was finite, with equal bits: the fault was transient"
        return (
            f"{report}. On two replicas it had equal bits, and was not finite: the fault is deterministic, of the "
            "model, its weights or its data, and not of a device"
        )

    def _check_sums(self, sums: GradientSync) -> None:
        """Check complete gradients, if that is due. Raises SilentCorruptionError, before the update."""
        if (finding := sums.finding(self._agreed)) is not None:
            raise self._consequences.end(finding, self._hosts)

    def _judge_again(self, results: list[Result]) -> tuple[Judgement, list[Result]]:
        """Compute the step again, on the same replicas and, if there is one, on a third one."""
        assert self._reruns is not None
        for shift in (0, 2 if self._reruns.replicas.count > 2 else 1):
            results = results + self._reruns.again(shift, self._consumed)[0]
        return judge(results), results

    def _fail(self, judged: tuple[Judgement, list[Result]], number: int) -> NoReturn:
        """Say which rank has computed wrong gradients, and end."""
        assert self._reruns is not None
        judgement, results = judged
        replicas = self._reruns.replicas.ranks
        if judgement.is_certain:
            ranks = sorted(
                rank
                for result in results
                if result.replica in judgement.replicas and result.unit in judgement.right
                for rank, own, right in zip(
                    replicas[result.replica], result.digest, judgement.right[result.unit], strict=True
                )
                if own != right
            )
            what = f"{named(ranks := list(dict.fromkeys(ranks)), self._hosts)} computed wrong gradients"
            what += ", and right ones" if judgement.kind == "transient" else ", more than once"
            what += " when they were computed again, as another replica did"
        else:
            ranks = [rank for replica in judgement.replicas for rank in replicas[replica]]
            what = f"{named(ranks, self._hosts)} computed different gradients of the same micro-batches, "
            what += "and each the same ones again" if judgement.kind == "sticky" else "and others again"
            what += ", so it is not known which of them is wrong"
        alone = judgement.is_certain and len({self._hosts[rank] for rank in ranks}) == 1
        finding = Finding(
            f"step {number}: {what}: the fault is {judgement.kind}",
            f"{judgement.kind} fault in a gradient",
            number,
            ranks if alone else (),
            self._verified,
        )
        raise self._consequences.end(finding, self._hosts)

    def _different(self, differences: Mapping[int, Difference], number: int) -> Finding:
        """Say which rank has wrong weights."""
        names = ", ".join(self._weights.names(differences))
        certain = [each for each in differences.values() if each.is_certain]
        wrong = sorted({rank for each in certain or differences.values() for rank in each.wrong})
        if any(each.at_rest for each in certain):
            what, why = "has weights or state that have changed between two updates", "memory changed"
        elif certain:
            others = sorted({rank for each in certain for rank in each.others})
            what, why = f"has other weights than {named(others, self._hosts)}", "weights differ from those of replicas"
        else:
            what, why = "have different weights, and it is not known which of them is wrong", ""
        text = f"before the update of step {number}, {named(wrong, self._hosts)} {what}: {names}"
        return Finding(text, why, number, wrong if certain else (), self._agreed)


def last_checked(iteration: int, interval: int | None) -> int:
    """Return the last step whose weights a check has seen before this step, by an interval that has not changed."""
    return 0 if interval is None else max(0, iteration // interval * interval - 1)
