"""Texts that a GPT writes while it is trained, under the layout of its training (`--sample-interval`)."""

from __future__ import annotations

from megalite.errors import ConfigurationError
from megalite.extras.post_training.rollout import TrainedNetwork
from megalite.inference.generation import check_prompts, generate
from megalite.inference.sampling import Sampling
from megalite.inference.text import encode_prompts
from megalite.tasks.gpt_task import GPTTask
from megalite.training.trainer import Trainer

LONGEST = 4000
"""Characters of a text that are kept."""


class TextSampler:
    """Writer of a text after each prompt, with the weights as they are.

    Each data-parallel rank writes all of them, which takes no longer than if one did. Nothing of the training changes:
    the random numbers are the sampling's own, and the network has its state again afterwards.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Encode the prompts. Called by all ranks together. Raises ConfigurationError if there can be no texts."""
        task, logging = trainer.task, trainer.config.logging
        assert isinstance(task, GPTTask)  # a run of a program has no tokenizer, and takes no such option
        self._trainer, self._tokenizer, self._tokens = trainer, task.data.tokenizer, logging.sample_tokens
        try:
            self._network = TrainedNetwork(task.chunks, trainer.engine)
            self._prompts = encode_prompts(self._tokenizer, logging.sample_prompts) or [[self._tokenizer.eod]]
            check_prompts(task.model, self._prompts)
        except ConfigurationError as error:
            raise ConfigurationError(f"--sample-interval: {error}") from error

    def texts(self) -> list[str]:
        """Return the prompts with what follows them, the same texts on all ranks. Called by all ranks together."""
        trainer, eod = self._trainer, self._tokenizer.eod
        tokens = [[token for token in prompt if token != eod] for prompt in self._prompts]
        with trainer.optimizer.gathered_parameters(), trainer.evaluating():
            for index, event in generate(
                self._network,
                self._prompts,
                max_new_tokens=self._tokens,
                ends=(eod,),
                sampling=Sampling(seed=trainer.config.training.seed),
                vocab_size=self._tokenizer.vocab_size,
            ):
                if isinstance(event, int):
                    tokens[index].append(event)
        return [self._tokenizer.decode(each)[:LONGEST] for each in tokens]
