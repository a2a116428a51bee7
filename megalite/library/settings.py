"""The layout and the optimizer of a run, as a program gives them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Signature, signature
from typing import Any, ClassVar, Literal, Self, get_args, get_type_hints

from megalite.config.optimizer import RULE_FLAGS, OptimizerConfig
from megalite.config.parallel import SHAPES, STRATEGIES, ParallelConfig, ScheduleName
from megalite.config.run import fits
from megalite.config.yaml_file import nearest
from megalite.errors import ConfigurationError
from megalite.library.arguments import unknown

Shape = Literal["constant", "linear", "cosine", "inverse-square-root"]


@dataclass(frozen=True)
class Layout:
    """Split of a run over ranks.

    >>> Layout(dp=2, pp=2, zero=1)
    Layout(dp=2, tp=1, pp=2, cp=1, ep=1, zero=1, instances=1, stages_per_rank=1, schedule=None, \
sequence_parallel=False, overlap=False)

    Attributes:
        dp: data-parallel ranks; None: all ranks that the other sizes leave.
        tp: tensor-parallel ranks, for parallel layers; plain modules are replicated on them.
        pp: pipeline ranks.
        cp: context-parallel ranks, which each have a part of the sequence of every sample, in all layers.
        ep: ranks over which experts are distributed.
        zero: ZeRO stage, 0 to 3: what is sharded over the data- and context-parallel ranks.
        instances: groups of these ranks that each hold all shards once (hybrid sharding).
        stages_per_rank: stages of a pipeline on each rank.
        schedule: order of forward and backward in a pipeline: "gpipe", "1f1b", "interleaved-1f1b", "zb-h1" or "zb-v";
            None: 1f1b, interleaved with several stages per rank.
        sequence_parallel: split activations between parallel layers along the sequence.
        overlap: reduce gradients during backward, and gather parameters during the next forward.
    """

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    instances: int = 1
    stages_per_rank: int = 1
    schedule: ScheduleName | None = None
    sequence_parallel: bool = False
    overlap: bool = False

    def config(self, world_size: int) -> ParallelConfig:
        """Return the fields of a run's configuration. Raises ConfigurationError if they do not fit the ranks."""
        for name in ("tp", "pp", "cp", "ep", "instances", "stages_per_rank"):
            if type(size := getattr(self, name)) is not int or size < 1:
                raise ConfigurationError(f"Layout({name}={size!r}): give a number of at least 1")
        if self.zero not in range(4):
            raise ConfigurationError(f"Layout(zero={self.zero!r}): ZeRO has the stages 0 to 3")
        of_copy = self.tp * self.pp * self.cp
        if self.dp is not None and self.dp * of_copy != world_size:
            raise ConfigurationError(
                f"Layout(dp={self.dp}, tp={self.tp}, pp={self.pp}, cp={self.cp}) needs {self.dp * of_copy} ranks, and "
                f"{world_size} {'is' if world_size == 1 else 'are'} running: start as many "
                "(docs/launchers.md), or leave dp out"
            )
        if world_size % of_copy:
            raise ConfigurationError(
                f"Layout(tp={self.tp}, pp={self.pp}, cp={self.cp}): {world_size} ranks cannot be divided into groups "
                f"of {of_copy}"
            )
        self._check_schedule()
        return ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            sequence_parallel=self.sequence_parallel and self.tp > 1,
            pipeline_schedule=self.schedule,
            num_virtual_stages_per_pipeline_rank=self.stages_per_rank if self.stages_per_rank > 1 else None,
            data_parallel_sharding_strategy=STRATEGIES[self.zero],
            num_distributed_optimizer_instances=self.instances,
            overlap_grad_reduce=self.overlap,
            overlap_param_gather=self.overlap and self.zero > 0,
        )

    def _check_schedule(self) -> None:
        """Raise ConfigurationError if the schedule is unknown or needs another number of stages per rank."""
        if self.stages_per_rank > 1 and self.pp == 1:
            raise ConfigurationError(f"Layout(stages_per_rank={self.stages_per_rank}) needs pp of 2 or more")
        if self.schedule is None:
            return
        if self.schedule not in SHAPES:
            raise ConfigurationError(f"Layout(schedule={self.schedule!r}): the schedules are {', '.join(SHAPES)}")
        wanted = SHAPES[self.schedule].chunks
        if (wanted is None and self.stages_per_rank == 1) or wanted not in (None, self.stages_per_rank):
            raise ConfigurationError(
                f"Layout(schedule={self.schedule!r}, stages_per_rank={self.stages_per_rank}): this schedule has "
                f"{'several stages' if wanted is None else f'stages_per_rank={wanted}'} per rank"
            )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Options that all optimizers share; one of the classes below is given to `Trainer`.

    Attributes:
        lr: highest learning rate.
        weight_decay: weight decay of tensors with two or more dimensions, unless `Trainer(decays=...)`
            chooses others.
        clip_grad: largest global norm of the gradient; 0: no clipping.
        schedule: shape of the learning rate after the warm-up: "constant", "linear", "cosine" or
            "inverse-square-root"; or a function from the number of steps before a step to the factor of its rate.
        steps: number of steps until the rate is `min_lr`, counted from the first one; not for "constant".
        warmup: number of steps in which the rate rises from 0.
        min_lr: lowest learning rate of the schedule.
    """

    lr: float
    weight_decay: float = 0.01
    clip_grad: float = 0.0
    schedule: Shape | Callable[[int], float] = "constant"
    steps: int | None = None
    warmup: int = 0
    min_lr: float = 0.0

    NAME: ClassVar[Literal["adam", "sgd", "muon", "lars", "lamb", "lion", "adafactor"]]

    def __new__(cls, *parameters: object, **options: Any) -> Self:
        """Make the optimizer. Raises ConfigurationError for parameters, and for options that it does not have."""
        if parameters:
            raise ConfigurationError(
                f"{cls.__name__}(...) takes options by their names only: Trainer has the parameters of the model"
            )
        known = [entry.name for entry in fields(cls)]
        if others := [name for name in options if name not in known]:
            raise unknown(cls.__name__, others[0], known)
        return super().__new__(cls)

    def config(self) -> OptimizerConfig:
        """Return the fields of a run's configuration. Raises ConfigurationError."""
        own, kinds = type(self).__name__, get_type_hints(type(self))
        if callable(self.schedule):
            if given := [name for name in ("steps", "warmup", "min_lr") if getattr(self, name)]:
                raise ConfigurationError(
                    f"{own}(schedule=...) is a function, which says all of the rate: drop {given[0]}"
                )
        elif self.schedule not in (shapes := get_args(Shape)):
            near = nearest(str(self.schedule), shapes)
            raise ConfigurationError(f"{own}(schedule={self.schedule!r}): choose one of {', '.join(shapes)}{near}")
        for entry in fields(self):
            value, kind = getattr(self, entry.name), kinds[entry.name]
            if entry.name not in ("betas", "schedule") and not fits(value, kind):
                wanted = getattr(kind, "__name__", kind)
                raise ConfigurationError(f"{own}({entry.name}={value!r}): the type of this option is {wanted}")
        style = "constant" if callable(self.schedule) else self.schedule
        if style != "constant" and self.steps is None:
            raise ConfigurationError(f"{own}(schedule={self.schedule!r}) needs steps=..., until the rate is min_lr")
        return OptimizerConfig(
            optimizer=self.NAME,
            lr=self.lr,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
            lr_decay_style=style,
            lr_decay_iters=self.steps,
            lr_warmup_iters=self.warmup,
            min_lr=self.min_lr,
            **self._own(),
        )

    def _own(self) -> dict[str, Any]:
        """Return the values of this optimizer's own options, by their names in the configuration: with a prefix."""
        own = dict[str, Any]()
        for entry in fields(self)[len(fields(Optimizer)) :]:
            value = getattr(self, entry.name)
            if entry.name == "betas" and not fits(value, tuple[float, float]):
                raise ConfigurationError(f"betas={value!r}: give two numbers")
            parts = zip(("beta1", "beta2"), value, strict=True) if entry.name == "betas" else ((entry.name, value),)
            for name, part in parts:
                names = (prefix + name for prefix in RULE_FLAGS[self.NAME].prefixes)
                own[next(each for each in names if each in OptimizerConfig.__dataclass_fields__)] = part
        return own


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW (arXiv:1711.05101): the options of all optimizers, and Adam's.

    >>> AdamW(lr=3e-4, schedule="cosine", steps=1000, warmup=100).config().lr_decay_iters
    1000
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    NAME = "adam"


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, and with weight decay that is added to the gradient.

    >>> SGD(lr=0.1, momentum=0.9).config().sgd_momentum
    0.9
    """

    momentum: float = 0.0

    NAME = "sgd"


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon for matrices, AdamW for all else (embedding tables, vectors). A model without matrices is refused.

    >>> Muon(lr=0.02, momentum=0.95).config().optimizer
    'muon'
    """

    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    NAME = "muon"


@dataclass(frozen=True, kw_only=True)
class LARS(Optimizer):
    """SGD for large batches, with a rate for each matrix in proportion to its norm (arXiv:1708.03888).

    >>> LARS(lr=10.0, warmup=100).config().lars_coefficient
    0.001
    """

    momentum: float = 0.9
    coefficient: float = 0.001

    NAME = "lars"


@dataclass(frozen=True, kw_only=True)
class LAMB(Optimizer):
    """AdamW for large batches, with a rate for each matrix in proportion to its norm (arXiv:1904.00962).

    >>> LAMB(lr=0.01, warmup=100).config().optimizer
    'lamb'
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    NAME = "lamb"


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion (arXiv:2302.06675): updates are signs. Its rate is a third to a tenth of AdamW's.

    >>> Lion(lr=1e-4, weight_decay=0.1).config().lion_beta2
    0.98
    """

    betas: tuple[float, float] = (0.95, 0.98)

    NAME = "lion"


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor (arXiv:1804.04235): of a matrix, it keeps averages of rows and of columns only.

    >>> Adafactor(lr=0.01).config().adafactor_eps
    1e-30
    """

    eps: float = 1e-30

    NAME = "adafactor"


for _kind in Optimizer.__subclasses__():  # otherwise help(AdamW) and editors would show the arguments of __new__
    _kind.__signature__ = Signature([*signature(_kind.__init__).parameters.values()][1:])  # type: ignore[attr-defined]


def no_optimizer(given: object) -> ConfigurationError:
    """Return the error about what was given as an optimizer of a run, and is none."""
    if isinstance(given, list | tuple | set | dict):
        return ConfigurationError(
            f"optimizer={type(given).__name__} of {len(given)}: give one optimizer for all parameters or, by patterns "
            'of names of parameters, several: optimizer={"generator": megalite.AdamW(lr=...), "critic": ...}'
        )
    kind = given if isinstance(given, type) else type(given)
    name = given if isinstance(given, str) else kind.__name__
    same = {each.__name__.lower(): each.__name__ for each in Optimizer.__subclasses__()} | {"adam": "AdamW"}
    here = same.get(name.lower(), "AdamW")
    if kind in Optimizer.__subclasses__():
        return ConfigurationError(f"optimizer={name} is a class: give megalite.{name}(lr=...)")
    shown = repr(given) if isinstance(given, str) else f"{kind.__module__}.{kind.__qualname__}"
    return ConfigurationError(
        f"optimizer={shown} is no optimizer of megalite, whose state is divided over ranks: give "
        f"megalite.{here}(lr=...) in place of it, without parameters"
    )
