"""Methods of the trainer for a GPT: losses of log-probabilities, generation, and the export of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.post_training.export import export_weights
from megalite.extras.post_training.log_probabilities import (
    LossFunction,
    Multipliers,
    TokenOutputs,
    log_probabilities,
    totals,
    with_loss,
)
from megalite.extras.post_training.receivers import Receiver
from megalite.extras.post_training.reference import Reference, load_teacher
from megalite.extras.post_training.rollout import Rollout, generate, log_probability_difference, to_micro_batches
from megalite.extras.post_training.token_task import TokenTask
from megalite.inference.sampling import Sampling
from megalite.parallel import collectives
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.mesh import ParallelMesh
from megalite.run.run import Run
from megalite.tasks.loss_functions import Count
from megalite.training.gradients import Gradients
from megalite.training.loss_terms import check_names
from megalite.training.metrics import StepMetrics
from megalite.training.resume import open_initial_model
from megalite.training.trainer import Trainer as TrainingState

Samples = TypeVar("Samples", Sequence[Any], Tensor)


class TokenMethods:
    """Methods of `megalite.Trainer` that only a GPT has."""

    _run: Run
    _trainer: TrainingState
    _gradients: Gradients | None
    _run_step: Callable[[Callable[[], StepMetrics]], dict[str, Any]]

    def forward_backward(
        self, batch: Mapping[str, Tensor], loss_fn: LossFunction, *, count: Count | None = None, entropies: bool = False
    ) -> None:
        """Compute the gradients of a loss of a GPT; `optimizer_step` applies them. Called by all ranks together.

        Args:
            batch: fields of this data-parallel rank's samples, as those of a dataset; `rollout_batch` makes them.
            loss_fn: function from `outputs`, whose `log_probabilities` [batch, sequence] are those of the labels, and
                the fields of a micro-batch, to a sum over the micro-batch, or to sums by name. Those that `count` names
                are terms of the loss, and others, which need no gradient, are only recorded.
            count: function from the fields to the number of items that the mean is taken over, or to numbers by name;
                None: the sum of the loss mask, for the sum "loss".
            entropies: give `outputs` the entropies of the predictions, too.
        """
        if self._gradients is not None:
            raise MegaliteError("the gradients of run.forward_backward have not been used: call run.optimizer_step")
        task, trainer = self._gpt(), self._trainer
        micro_batches = self._micro_batches(batch)
        own = task.terms_of(count, micro_batches[0])
        terms = (*own, *trainer.terms[len(task.evaluated) :])
        check_names(terms)
        fields, names = [each.values for each in micro_batches], [term.name for term in own]
        micro_batches = with_loss(micro_batches, loss_fn, fields, terms=names, entropies=entropies)
        trainer.schedules.prove(training=[len(micro_batches)], mesh=self._run.mesh)
        self._gradients = trainer.forward_backward(micro_batches, terms, Multipliers)

    def optimizer_step(self, **figures: float | Tensor) -> dict[str, Any]:
        """Update the weights by the gradients of `forward_backward`. Returns the step's record.

        `figures`: numbers of this data-parallel rank, whose means over the ranks are recorded, too.
        """
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise MegaliteError("there are no gradients: call run.forward_backward first")
        own = [term.name for term in gradients.terms]
        sums = totals(gradients.sums, self._run.mesh, without=own)
        means = {name: value / (gradients.counts[gradients.terms[0].name] or 1.0) for name, value in sums.items()}
        means |= _means(figures, self._run.mesh)
        return self._run_step(lambda: self._trainer.update(gradients, means))

    def share(self, samples: Samples) -> Samples:
        """Return this data-parallel rank's part of a list or a tensor: every n-th of its elements, for n ranks.

        What `generate` samples after these prompts is then the same under any layout, except for rounding.
        """
        mesh = self._run.mesh
        return samples[mesh.coordinate("dp") :: mesh.size("dp")]

    def mean(self, number: float | Tensor) -> float:
        """Return the mean of a number over data-parallel ranks. Called by all ranks together."""
        return _means({"number": number}, self._run.mesh)["number"]

    def logprobs(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities of the labels of this data-parallel rank's samples, [samples, sequence], in fp32
        or wider, without gradients and dropout. Called by all ranks together.
        """
        return self._logprobs(batch, partial(log_probabilities, self._gpt().chunks, self._trainer.engine))

    def reference(self) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """Return a function like `logprobs` of a copy of the network as it is now, which is not trained.

        It is sharded as the network is.
        """
        copy = Reference(self._gpt().chunks, self._trainer.engine, self._trainer.optimizer)
        return partial(self._logprobs, score=copy.log_probabilities)

    def teacher(self, path: str | Path) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """Return a function like `logprobs` of another GPT: a checkpoint of megalite, or a Hugging Face folder.

        It is sharded as the network is.
        """
        with raise_on_all_ranks(self._run.mesh, f"opening {path}"):
            opened = open_initial_model(Path(path))
        teacher = load_teacher(opened, self._gpt().chunks, self._trainer.engine, self._trainer.optimizer)
        return partial(self._logprobs, score=teacher.log_probabilities)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eod: int = -1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> list[Rollout]:
        """Generate after prompts with the weights as they are. Called by all ranks together.

        Args:
            prompts: token numbers of this data-parallel rank's prompts.
            eod: token that ends a sequence; -1 for none.
            temperature, top_k, top_p: how tokens are sampled; a temperature of 0 takes the most likely ones.
            seed: None: the run's seed and its step.
        """
        task, trainer = self._gpt(), self._trainer
        seed = self._run.config.training.seed + self._trainer.iteration if seed is None else seed
        return generate(
            task.chunks,
            trainer.engine,
            trainer.optimizer,
            prompts,
            max_new_tokens=max_new_tokens,
            eod=eod,
            sampling=Sampling(temperature, top_k, top_p, seed),
            vocab_size=task.model.vocab_size,
        )

    def rollout_batch(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """Return rollouts as the fields of samples: `tokens`, `labels`, `loss_mask` (1 for generated labels) and
        `generated_logprobs`, [samples, sequence] each.
        """
        task = self._gpt()
        whole = to_micro_batches(
            rollouts,
            micro_batch_size=len(rollouts),
            sequence_length=task.config.data.seq_length,
            dtype=task.dtype,
            device=self._run.mesh.device,
        )[0]
        batch = whole.micro_batch
        assert batch.labels is not None
        assert batch.loss_mask is not None
        fields = {"tokens": batch.tokens, "labels": batch.labels, "loss_mask": batch.loss_mask}
        return {**fields, "generated_logprobs": whole.log_probabilities}

    def compare_logprobs(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Return how much training's log-probabilities of a `rollout_batch` differ from those of generation."""
        mask, generated = batch["loss_mask"], batch["generated_logprobs"]
        return log_probability_difference([generated], [self.logprobs(batch)], [mask], self._run.mesh)

    def export_weights(self, to: Receiver | Path | str) -> None:
        """Stream the weights of a GPT as Hugging Face's tensors by name, into a new folder or to a receiver.

        No rank holds more than one tensor in addition to its own part. Called by all ranks together.
        """
        task = self._gpt()
        length = task.config.data.seq_length
        adapters = task.config.adapters
        export_weights(task.chunks, self._trainer.optimizer, to, sequence_length=length, adapters=adapters)

    def _gpt(self) -> TokenTask:
        task = self._run.task
        if not isinstance(task, TokenTask):
            raise ConfigurationError("only a GPT has tokens: give Trainer a megalite.GPTConfig")
        return task

    def _micro_batches(self, batch: Mapping[str, Tensor]) -> list[Any]:
        """Divide the fields of samples into micro-batches. All ranks must have the same number of samples."""
        if not self._trainer.shares.are_equal:
            raise ConfigurationError("data_parallel_shares: a batch of the program is divided equally. Leave it out")
        size = self._run.config.training.micro_batch_size
        counts = collectives.all_gather_json(len(batch["tokens"]), self._run.mesh)
        if len(set(counts)) > 1 or not counts[0] or counts[0] % size:
            shown = ", ".join(map(str, dict.fromkeys(counts)))
            raise MegaliteError(
                f"ranks have {shown} samples: give each the same number, a multiple of micro_batch_size={size}"
            )
        first = self._trainer.consumed_samples + self._run.mesh.coordinate("dp") * counts[0]
        micro_batches = []
        for start in range(0, counts[0], size):
            fields = {name: value[start : start + size] for name, value in batch.items()}
            micro_batches.append(self._gpt().micro_batch(fields, range(first + start, first + start + size)))
        return micro_batches

    def _logprobs(self, batch: Mapping[str, Tensor], score: Callable[..., list[TokenOutputs]]) -> Tensor:
        micro_batches = self._micro_batches(batch)
        count = len(micro_batches)
        actions = self._trainer.schedules.prove(evaluation=[count], mesh=self._run.mesh).evaluation(count)
        outputs = score(actions, micro_batches)
        return torch.cat([each.log_probabilities for each in outputs])


def _means(figures: Mapping[str, float | Tensor], mesh: ParallelMesh) -> dict[str, float]:
    """Return the means of figures over data-parallel ranks, which must all have them."""
    of_ranks = collectives.all_gather_json({name: float(value) for name, value in figures.items()}, mesh, "dp")
    return {name: sum(of_rank[name] for of_rank in of_ranks) / len(of_ranks) for name in figures}
