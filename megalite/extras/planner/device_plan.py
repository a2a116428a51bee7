"""Plans for devices that are not alike: the slowest device of a group counts, and the smallest that holds a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megalite.config import RunConfig
from megalite.config.validate import resolve
from megalite.errors import MegaliteError
from megalite.extras.planner.cluster import Stack
from megalite.extras.planner.cost import Cost
from megalite.extras.planner.device_classes import DeviceClass, classes_of
from megalite.extras.planner.dry_run import dry_run
from megalite.extras.planner.layouts import Layout
from megalite.extras.planner.memory import RankMemory
from megalite.extras.planner.plan import Plan, Planner
from megalite.extras.planner.step import Step, StepTime
from megalite.training.kernels import require_equal_dropout


class MixedStep(Step):
    """A step of a pipeline whose ranks are those of steps on devices of other classes."""

    def __init__(self, of_ranks: Sequence[Step]) -> None:
        """Put the steps together. `of_ranks`: a step of the same layout for each pipeline rank."""
        vars(self).update(vars(of_ranks[0]))
        self._of_ranks = of_ranks
        self.stages = [of_ranks[self.layout.place(stage)[0]].stages[stage] for stage in range(self.layout.count)]
        self.transfer = max(step.transfer for step in of_ranks)

    def _afterwards(self, rank: int) -> Cost:
        return self._of_ranks[rank]._afterwards(rank)


class MixedPlanner(Planner):
    """Planner of one layout of a run with `device_classes`, which are its text."""

    def __init__(self, config: RunConfig, stack: Stack | None = None) -> None:
        self.classes = classes_of(config.parallel)
        slowest = min(self.classes.classes, key=lambda one: one.speed)
        super().__init__(config, slowest.cluster, self.classes.world_size, stack)
        self._of_classes: dict[str, Planner] = {}

    def of_class(self, one: DeviceClass) -> Planner:
        """Return the planner of runs on devices of this class alone."""
        if one.name not in self._of_classes:
            self._of_classes[one.name] = Planner(self.config, one.cluster, self.gpus, self.prices.stack)
        return self._of_classes[one.name]

    def plan(self, config: RunConfig) -> Plan:
        """Return the plan of the layout that the flags describe. Raises ConfigurationError if it is not valid."""
        config = resolve(config, self.gpus)
        require_equal_dropout(config, self.device)
        steps = self._steps(config)
        parallel = config.parallel
        replicas = {
            self.classes.of_replica(each, parallel): None for each in range(parallel.data_parallel_size(self.gpus))
        }
        times = [MixedStep([steps[one.name] for one in replica]).simulated for replica in replicas]
        memory, rooms = zip(*self._fullest(config, steps), strict=True)
        plan = Plan(
            config,
            self.gpus,
            Layout.of(config),
            max(times, key=lambda time: time.seconds),
            memory,
            rooms[0],
            min((one.cluster.host.memory for one in self.classes.classes if one.cluster.host), default=None),
            rooms,
        )
        return replace(plan, room=rooms[plan.fullest])

    def alone(self, config: RunConfig) -> dict[str, StepTime]:
        """Return the time of a step if all devices were of a class, by its name."""
        return {name: step.simulated for name, step in self._steps(resolve(config, self.gpus)).items()}

    def confirm(self, plan: Plan) -> tuple[int, float]:
        """Run one step of a rank of the fullest stage that has the smallest devices, as `Planner.confirm` does."""
        size = self.gpus // plan.config.parallel.pipeline_model_parallel_size
        ranks = range(plan.fullest * size, (plan.fullest + 1) * size)
        rank = next(each for each in ranks if self.classes.of(each).room == plan.room)
        model = replace(plan.config.model, vocab_size=self._given.vocab_size)
        found = dry_run(replace(plan.config, model=model), self.gpus, rank, of_gpu=not self.cluster.gpu.is_cpu)
        return rank, found.peak_blocks + self.classes.of(rank).cluster.gpu.reserved

    def _steps(self, config: RunConfig) -> dict[str, Step]:
        """Return the step on devices of each class alone, with its flags."""
        found = {}
        for one in self.classes.classes:
            step = self.of_class(one).step(one.on(config))
            if step is None:
                raise MegaliteError(f"the network cannot be divided as {config.parallel.layout(self.gpus)}")
            found[one.name] = step
        return found

    def _fullest(self, config: RunConfig, steps: Mapping[str, Step]) -> list[tuple[RankMemory, float]]:
        """Return the memory of each pipeline rank on the class that has the least to spare, and its room."""
        memory = {one.name: self.of_class(one).memory(steps[one.name]) for one in self.classes.classes}
        found = []
        for rank in range(config.parallel.pipeline_model_parallel_size):
            held = self.classes.of_pipeline_rank(rank, config.parallel)
            pairs = [(memory[one.name][rank], one.room) for one in held]
            found.append(max(pairs, key=lambda pair: pair[0].total - pair[1]))
        return found


def device_lines(config: RunConfig, *, of_gpu: bool) -> dict[str, object]:
    """Return lines of the summary: the classes, and what the slowest one costs.

    `of_gpu`: whether the run is on GPUs. Otherwise no step is predicted.
    """
    classes = classes_of(config.parallel)
    held = ", ".join(f"{each.ranks} x {each.name}" for each in classes.classes)
    if not of_gpu:
        ordered = sorted(classes.classes, key=lambda one: one.speed)
        share = ordered[0].speed / ordered[-1].speed
        slowest = f"; {ordered[0].name} is the slowest, with {share:.2f} x the FLOP/s of {ordered[-1].name}"
        return {"classes": held + (slowest if share < 1 else "")}
    try:
        planner = MixedPlanner(config)
        plan = planner.plan(planner.config)
        alone = {name: time.seconds for name, time in planner.alone(planner.config).items()}
    except MegaliteError:  # the run trains what the planner does not know
        return {"classes": held}
    slow, fast = max(alone, key=alone.__getitem__), min(alone, key=alone.__getitem__)
    cost = (
        f"predicted {plan.step.seconds:.4g} s per step; {slow} is the slowest: all of them {fast}, a step would take "
        f"{alone[fast]:.4g} s ({1 - alone[fast] / plan.step.seconds:.0%} less)"
    )
    lines: dict[str, object] = {"classes": held, "  slowest": cost}
    if plan.missing:
        lines["  memory"] = f"does not fit, as predicted: {plan.too_large}"
    return lines
