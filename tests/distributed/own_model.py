"""Models of one's own: small networks, their samples, and a step of each in plain torch, in one process or under DDP.

The networks are lists of eight layers, so that every pipeline of up to eight stages can be cut from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megalite

SAMPLES, STEPS, RATE, DECAY = 12, 3, 0.02, 0.1
LENGTH, VOCABULARY, WIDTH, CLASSES, WIDE = 4, 11, 8, 5, 32
IGNORED = -100

Values = dict[str, Tensor]
Sums = dict[str, Tensor]


# ---------------------------------------------------------------------------------------------------- the networks


class Table(nn.Module):
    """Embedding whose table is also the matrix of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.down(self.up(hidden).tanh())


class Scores(nn.Module):
    """Scores by a table that another layer has, too."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table, self.bias = table, nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.table.t() + self.bias


class Patches(nn.Module):
    """Patches of an image, with a frozen table of positions and a first element that is learned."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.cut(image).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(image), 1, WIDTH), patches], 1) + self.positions


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        first = self.norm(hidden[:, 0])
        return {"scores": self.scores(first), "features": first}


class EncoderEnd(nn.Module):
    """Last layer of an encoder: every layer of the decoder needs its output. It has a term of the loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = encoder_layer()

    def forward(self, hidden: Tensor) -> megalite.StageOutput:
        memory = self.layer(hidden)
        return megalite.StageOutput({"memory": memory}, {"energy": memory.square().sum()})


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        return self.layer(hidden, memory)


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, target: Tensor) -> Tensor:
        return self.table(target)


class Pair(nn.Module):
    """Layer of a frozen teacher, and one of its student."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def forward(self, teacher: Tensor, student: Tensor) -> dict[str, Tensor]:
        return {"teacher": self.teacher(teacher).sin(), "student": self.student(student)}


class FirstPair(Pair):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(tokens, tokens)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)


def mlp() -> list[nn.Module]:
    first = Table()
    tied: Any = first.table.weight
    return [first, *(Block() for _ in range(6)), Scores(tied)]


class Watch(nn.Module):
    """Layer that keeps the mean of what it gets, as a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean = hidden.detach().mean((0, 1))
        return hidden


def watched() -> list[nn.Module]:
    layers = mlp()
    return [*layers[:5], Watch(), *layers[6:]]


def conv(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> list[nn.Module]:
    """Return layers some of which have no parameter, or change their input in place."""
    return [
        nn.Conv2d(3, 4, 3, bias=False),  # a bias before BatchNorm has a gradient of rounding alone
        norm(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        norm(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, CLASSES),
    ]


def conv_over_ranks() -> list[nn.Module]:
    return conv(megalite.SyncBatchNorm)


def vit() -> list[nn.Module]:
    return [Patches(), *(encoder_layer() for _ in range(6)), Classes()]


def translator() -> list[nn.Module]:
    source = Table()
    return [
        source,
        encoder_layer(),
        EncoderEnd(),
        Target(),
        Decoder(),
        Decoder(),
        Decoder(),
        nn.Linear(WIDTH, VOCABULARY),
    ]


def distilled() -> list[nn.Module]:
    """Return layers of a teacher and of a student, one layer of which is frozen, too."""
    pairs = [Pair(nn.Linear(WIDE, WIDE), Block()) for _ in range(6)]
    pairs[2].requires_grad_(False)
    first = FirstPair(nn.Embedding(VOCABULARY, WIDE), nn.Embedding(VOCABULARY, WIDTH))
    return [first, *pairs, Pair(nn.Linear(WIDE, VOCABULARY), nn.Linear(WIDTH, VOCABULARY))]


def run_distilled(layers: Sequence[nn.Module], values: Values) -> tuple[dict[str, Tensor], Sums]:
    outputs = layers[0](values["tokens"])
    for layer in layers[1:]:
        outputs = layer(**outputs)
    return outputs, {}


def run_translator(layers: Sequence[nn.Module], values: Values) -> tuple[Tensor, Sums]:
    """Run a translator's layers by hand."""
    end = layers[2](layers[1](layers[0](values["tokens"])))
    hidden = layers[3](values["target"])
    for layer in layers[4:7]:
        hidden = layer(hidden, end.tensors["memory"])
    return layers[7](hidden), dict(end.terms)


# ---------------------------------------------------------------------------------------------------- their losses


def of_tokens(scores: Tensor, values: Values) -> Tensor:
    """Return a sum over the labels [batch, length] that count."""
    return F.cross_entropy(scores.flatten(0, 1), values["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def mean_of_tokens(scores: Tensor, values: Values) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), values["target"].flatten())


def share_correct(scores: Tensor, values: Values) -> Tensor:
    """Return a sum over samples of the share of their tokens that are correct."""
    return (scores.argmax(-1) == values["target"]).double().mean(1).sum()


def tokens_that_count(values: Values) -> Tensor:
    return (values["labels"] != IGNORED).sum()


def mean_of_classes(scores: Tensor, values: Values) -> Tensor:
    """Return a mean over samples, as in most programs."""
    return F.cross_entropy(scores, values["label"])


def of_classes_and_size(output: Mapping[str, Tensor], values: Values) -> Sums:
    classes = F.cross_entropy(output["scores"], values["label"], reduction="sum")
    return {"classes": classes, "size": 0.1 * output["features"].square().sum()}


def count_classes_and_size(values: Values) -> dict[str, int]:
    return {"classes": len(values["label"]), "size": len(values["label"]) * WIDTH}


def of_tokens_and_teacher(outputs: Mapping[str, Tensor], values: Values) -> Sums:
    student, teacher = outputs["student"].log_softmax(-1), outputs["teacher"].softmax(-1)
    return {"tokens": of_tokens(student, values), "teacher": F.kl_div(student, teacher, reduction="sum")}


def count_tokens_and_teacher(values: Values) -> dict[str, int]:
    return {"tokens": int(tokens_that_count(values)), "teacher": values["labels"].numel()}


def correct_classes(output: Any, values: Values) -> Tensor:
    scores = output["scores"] if isinstance(output, Mapping) else output
    return (scores.argmax(-1) == values["label"]).sum()


def memory_elements(values: Values) -> Tensor:
    return torch.tensor(float(values["tokens"].numel() * WIDTH))


ENERGY = megalite.LossTerm("energy", lambda batch: memory_elements(batch.values), weight=0.05)


@dataclass(frozen=True)
class Model:
    """A network with its loss, as options of `megalite.Trainer` and as a function for plain torch."""

    layers: Callable[[], list[nn.Module]]
    options: dict[str, Any]
    run: Callable[[Sequence[nn.Module], Values], tuple[Any, Sums]]
    """Runs the layers: the output, and sums of terms of the loss that layers return."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of terms other than 1."""
    as_sequence: bool = False
    """It is given as one nn.Sequential, not as a list."""

    def counts(self, values: Values) -> dict[str, float]:
        """Return the number of items of each term of the loss in a micro-batch."""
        count = self.options.get("count")
        found = len(values["label"]) if count is None else count(values)
        counts = dict(found) if isinstance(found, dict) else {"loss": float(found)}
        return {**counts, **{term.name: float(memory_elements(values)) for term in self.options.get("terms", ())}}

    def sums(self, layers: Sequence[nn.Module], values: Values) -> Sums:
        """Return the sum of each term of the loss over a micro-batch."""
        output, sums = self.run(layers, values)
        found = self.options["loss"](output, values)
        if "count" not in self.options:
            found = found * len(values["label"])
        return {**(found if isinstance(found, dict) else {"loss": found}), **sums}

    def loss(self, sums: Sums, counts: Mapping[str, float]) -> Tensor:
        """Return what is differentiated, from sums over a micro-batch and counts over the step."""
        means = [self.weights.get(name, 1.0) * each / counts[name] for name, each in sums.items()]
        return torch.stack(means).sum()


def in_turn(name: str) -> Callable[[Sequence[nn.Module], Values], tuple[Any, Sums]]:
    def run(layers: Sequence[nn.Module], values: Values) -> tuple[Any, Sums]:
        hidden = values[name]
        for layer in layers:
            hidden = layer(hidden)
        return hidden, {}

    return run


MODELS = {
    "mlp": Model(
        mlp,
        {"loss": of_tokens, "count": tokens_that_count, "sequence_dims": {"tokens": 1, "labels": 1}},
        in_turn("tokens"),
    ),
    "conv": Model(conv, {"loss": mean_of_classes}, in_turn("input"), as_sequence=True),
    "conv over ranks": Model(conv_over_ranks, {"loss": mean_of_classes}, in_turn("input"), as_sequence=True),
    "vit": Model(vit, {"loss": of_classes_and_size, "count": count_classes_and_size}, in_turn("image")),
    "translator": Model(
        translator,
        {"loss": of_tokens, "count": tokens_that_count, "terms": (ENERGY,)},
        run_translator,
        weights={"energy": 0.05},
    ),
    "distilled": Model(distilled, {"loss": of_tokens_and_teacher, "count": count_tokens_and_teacher}, run_distilled),
}
CUT = {
    "mlp": MODELS["mlp"],
    "watched": Model(
        watched,
        {"loss": mean_of_tokens, "buffers": {"5.mean": "average"}, "sequence_dims": {"tokens": 1, "target": -1}},
        in_turn("tokens"),
    ),
}
"""Networks whose samples may be cut along their sequences."""
NETWORKS = {**MODELS, **CUT}


def built(model: str, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Return the layers, alike in every process."""
    torch.manual_seed(7)
    return [layer.to(dtype) for layer in NETWORKS[model].layers()]


# ---------------------------------------------------------------------------------------------------- their samples


class Samples(torch.utils.data.Dataset[Values]):
    """Samples with the fields that every network needs, each drawn by its number."""

    def __init__(self, length: int, first: int = 0) -> None:
        self._length, self._first = length, first

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Values:
        generator = torch.Generator().manual_seed(self._first + number)
        labels = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels[: number % 3] = IGNORED
        return {
            "tokens": torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)[:LENGTH],
            "target": torch.randint(VOCABULARY, (LENGTH,), generator=generator),
            "labels": labels,
            "input": torch.randn(3, 8, 8, generator=generator, dtype=torch.float64),
            "image": torch.randn(3, 8, 8, generator=generator, dtype=torch.float64),
            "label": torch.randint(CLASSES, (), generator=generator),
        }


TRAINED, EVALUATED = Samples(40), Samples(24, first=1000)
"""The epochs of the first end within steps."""


def batch_of(numbers: Sequence[int], dataset: Samples = TRAINED) -> Values:
    batch: Values = torch.utils.data.default_collate([dataset[number % len(dataset)] for number in numbers])
    return batch


# ---------------------------------------------------------------------------------------------------- the cells


@dataclass(frozen=True)
class Cell:
    """A run: a network, its layout and the options of its training."""

    model: str
    dp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    instances: int = 1
    schedule: Any = "1f1b"
    overlap: bool = False
    micro_batches: int = 2
    optimizer: str = "adamw"
    clip: float = 0.0
    recompute: bool = False
    precision: str = "fp64"
    spoiled: bool = False
    """One of the buffers has other values."""

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.schedule in ("interleaved-1f1b", "zb-v") else 1

    @property
    def micro_batch_size(self) -> int:
        return SAMPLES // (self.dp * self.micro_batches)

    def __str__(self) -> str:
        shown = [self.model.replace(" ", "-"), f"dp{self.dp}", f"pp{self.pp}", f"zero{self.zero}", self.optimizer]
        shown += (
            [f"cp{self.cp}"] * (self.cp > 1)
            + [self.schedule] * (self.pp > 1)
            + [f"instances{self.instances}"] * (self.instances > 1)
        )
        shown += ["overlap"] * self.overlap + ["clip"] * bool(self.clip) + ["recompute"] * self.recompute
        return "-".join(shown)

    def trainer(self, **options: Any) -> megalite.Trainer:
        """Start the run on this rank. Called on all ranks together."""
        model, layers = NETWORKS[self.model], built(self.model)
        if self.spoiled:
            next(buffer for layer in reversed(layers) for buffer in layer.buffers()).add_(1)
        network = {"model": nn.Sequential(*layers)} if model.as_sequence else {"stages": layers}
        of_optimizer: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY, "clip_grad": self.clip}
        optimizer: Any = megalite.AdamW(**of_optimizer)
        if self.optimizer == "sgd":
            optimizer = megalite.SGD(**of_optimizer, momentum=0.9)
        given: dict[str, Any] = {
            **network,
            **model.options,
            "dataset": TRAINED,
            "optimizer": optimizer,
            "layout": megalite.Layout(
                dp=self.dp,
                pp=self.pp,
                cp=self.cp,
                zero=self.zero,
                instances=self.instances,
                schedule=self.schedule if self.pp > 1 else None,
                stages_per_rank=self.stages_per_rank if self.pp > 1 else 1,
                overlap=self.overlap,
            ),
            "precision": self.precision,
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": SAMPLES,
            "recompute": self.recompute,
            "quiet": True,
            "watchdog": False,
        }
        return megalite.Trainer(**{**given, **options})


# ---------------------------------------------------------------------------------------------------- plain torch


@dataclass
class Trained:
    """Result of a training: what must not depend on the layout."""

    losses: list[dict[str, float]] = field(default_factory=list)
    """Means of the terms, one entry per step."""
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step, after clipping."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def optimizer_of(cell: Cell, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer. Vectors do not decay."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.SGD(groups, RATE, momentum=0.9) if cell.optimizer == "sgd" else torch.optim.AdamW(groups, RATE)


def micro_batches(cell: Cell, step: int) -> Iterator[tuple[int, Values]]:
    """Yield the data-parallel rank and the samples of every micro-batch of a step."""
    size = cell.micro_batch_size
    joined = cell.model == "conv over ranks"
    for number in range(cell.micro_batches):
        for rank in range(1 if joined else cell.dp):
            first = step * SAMPLES + (number * cell.dp + rank) * size
            yield rank, batch_of(range(first, first + size * (cell.dp if joined else 1)))


def plainly(cell: Cell, steps: int = STEPS) -> Trained:
    """Train in one process with torch alone, on the micro-batches of all ranks. Buffers are those of the first rank."""
    model = NETWORKS[cell.model]
    network = nn.ModuleList(built(cell.model))
    layers, trained = list(network), [p for p in network.parameters() if p.requires_grad]
    optimizer, found = optimizer_of(cell, trained), Trained()
    for step in range(steps):
        optimizer.zero_grad()
        batches = list(micro_batches(cell, step))
        counts, means = total([model.counts(values) for _, values in batches]), dict[str, float]()
        for rank, values in batches:
            before = {name: buffer.clone() for name, buffer in network.named_buffers()}
            sums = model.sums(layers, values)
            model.loss(sums, counts).backward()
            for name, each in sums.items():
                means[name] = means.get(name, 0.0) + each.item() / counts[name]
            if rank:  # only the first rank's buffers count
                set_buffers(network, before)
        found.losses.append(means)
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trained]
        found.norms.append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())
        if cell.clip:
            torch.nn.utils.clip_grad_norm_(trained, cell.clip)
        if step == 0:
            found.gradients = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        optimizer.step()
    found.parameters = {name: p.detach().clone() for name, p in network.named_parameters()}
    found.buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    return found


@torch.no_grad()
def set_buffers(network: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in network.named_buffers():
        buffer.copy_(values[name])


def total(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(sum(each[name] for each in counts)) for name in counts[0]}
