"""Data of a run, from its configuration: opened and checked before torch is imported."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from megalite.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megalite.config.loss_weights import loss_weights
from megalite.config.run import TaskConfig
from megalite.data.blend import BlendedDataset, Dataset
from megalite.data.chat import ChatTemplate, find_template, given_template
from megalite.data.datasets import Datasets, Samples, build_mock_datasets, build_token_datasets, target_samples
from megalite.data.fields import FieldsDataset, SampleFields
from megalite.data.fill_in_the_middle import FillInTheMiddle, FillInTheMiddleDataset, token_by_name
from megalite.data.loss_weights import WeightedDataset, weighted_roles, weights_of_roles, weights_of_sources
from megalite.data.mixed import MixedSamples
from megalite.data.routing_records import RoutingRecords
from megalite.data.sampler import GlobalBatchSize
from megalite.data.sft_dataset import build_sft_datasets
from megalite.data.sources import Sources, SourceTokens
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.data.verification import Verification
from megalite.entry_points import entry_point
from megalite.errors import DataError, MegaliteError

PROBES = 16
"""Number of samples whose checksums a checkpoint keeps."""
_OF_GPT2 = 50_257
_NO_TOKENIZER = 1000
"""Vocabulary in place of that of a tokenizer whose files are not here."""
NOT_OF_THE_SAMPLES = ("data_cache_path", "num_workers", "mmap_bin_files", "fast_encoding", "loss_weights")
"""Fields of `DataConfig` that change neither the samples nor their order."""


@dataclass(frozen=True)
class RunData:
    """Data of a run, opened before the ranks communicate. `notes` are messages for the person who starts the run."""

    tokenizer: Tokenizer
    train: Dataset[SampleFields]
    valid: Dataset[SampleFields] | None
    test: Dataset[SampleFields] | None
    notes: tuple[str, ...] = ()
    verification: Verification | None = None
    """Check of the token files in the background, while the run starts and trains."""
    routing: RoutingRecords | None = None
    """Records of routing that training replays."""
    sources: Sources | None = None
    """Sources of the samples of training, if there are several."""
    valid_sources: Sources | None = None
    test_sources: Sources | None = None
    valid_sets: Mapping[str, Dataset[SampleFields]] = field(default_factory=dict)
    """Validation sets by name, in place of `valid`."""
    mix: MixedSamples | None = None
    """The samples that `train` has, if their mix may change."""

    @property
    def has_validation(self) -> bool:
        return self.valid is not None or bool(self.valid_sets)


def vocab_size(tokenizer: Tokenizer, model: ModelConfig) -> int:
    """Return the vocabulary size of the network: the tokenizer's, or a larger one of the flags or imported weights."""
    return max(tokenizer.vocab_size, model.vocab_size or 0)


def known_vocabulary(config: RunConfig) -> tuple[int, str]:
    """Return the number of tokens, whether or not the tokenizer can be opened, and where it comes from, as text."""
    try:
        return open_tokenizer(config).vocab_size, "of the tokenizer"
    except MegaliteError:
        if config.model.vocab_size is not None:
            return config.model.vocab_size, "of --vocab-size"
        if config.data.tokenizer_type == "GPT2BPETokenizer":
            return _OF_GPT2, "of GPT-2"
        return _NO_TOKENIZER, "a guess: the tokenizer's files are not here"


def global_batch_size(config: RunConfig) -> GlobalBatchSize:
    """Return the number of samples per step. The configuration must be resolved."""
    if config.training.global_batch_size is None:
        raise ValueError("the configuration has not been resolved")
    schedule = config.training.batch_size_schedule(config.data.seq_length)
    return GlobalBatchSize(config.training.global_batch_size, config.training.rampup_batch_size, schedule)


def has_length(training: TrainingConfig) -> bool:
    """Tell whether the configuration gives the length of the run; a program may give it step by step instead."""
    return training.train_iters is not None or training.train_samples is not None


def last_iteration(
    config: TaskConfig, batch_size: GlobalBatchSize, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Return the number of the last step of a run that has done `iteration` steps with `consumed_samples` samples.

    A remainder of --train-samples that is smaller than one global batch is not trained on.
    """
    if config.training.train_iters is not None:
        return config.training.train_iters
    return iteration + batch_size.steps(consumed_samples, config.training.train_samples or 0)


def training_samples(training: TrainingConfig) -> int:
    """Return the number of samples that a run of some length draws, which decides their order."""
    if training.train_samples is not None:
        return training.train_samples
    return (training.train_iters or 0) * (training.global_batch_size or 0)


def seen_samples(dataset: Dataset[SampleFields], consumed_samples: int) -> list[tuple[int, int]]:
    """Return the numbers of some consumed samples, evenly spaced, each with a CRC-32 of its tokens."""
    numbers = sorted({consumed_samples * part // PROBES for part in range(PROBES)} if consumed_samples else ())
    return [(number, zlib.crc32(dataset[number]["tokens"].tobytes())) for number in numbers]


def order_notes(dataset: Dataset[SampleFields], seen: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Return a note if a sample from `seen_samples` of the checkpoint has a different content in this run."""
    for number, checksum in seen:
        if number >= len(dataset) or zlib.crc32(dataset[number]["tokens"].tobytes()) != checksum:
            return (
                f"note: sample {number}, consumed before this checkpoint, is another now: the data or their order have "
                "changed, so some samples may be repeated and others never read. To keep the order, keep --data-path, "
                "--split, --seed, --seq-length and, if the data are repeated, --train-samples",
            )
    return ()


def open_data(config: RunConfig, local_rank: int = 0) -> RunData:
    """Open the tokenizer and the datasets. Local rank 0 also starts to verify the token files in the background.

    Raises DataError or ConfigurationError, the same on every rank.
    """
    training, tokenizer = config.training, open_tokenizer(config)
    sizes = global_batch_size(config)
    samples = target_samples(
        train_samples=training_samples(training),
        train_iters=last_iteration(config, sizes),
        global_batch_size=training.evaluation_batch_size or sizes.final,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        full_validation=training.full_validation,
        set_names=training.validation_set_names if training.multiple_validation_sets else None,
    )
    verification = Verification(reads=local_rank == 0)
    opened, taken = open_datasets(config, tokenizer, samples, verification)
    train = opened.train
    if train is None:
        raise ValueError("a run of no steps has no data")
    replayed = training.moe_replay_routing
    routing = None if replayed is None else routing_records(config, replayed)
    if routing is not None:
        if routing.is_empty:
            raise DataError(
                f"--moe-replay-routing {replayed} has no records: they are files like {routing.path(0).name}"
            )
        for sample in _outermost_samples(config):
            routing.require(sample)
    verification.begin()
    of_train: Sources | None
    of_train, of_valid, of_test = (_sources(each, config.data.seq_length) for each in taken)
    mix = cast(MixedSamples, taken[0]) if config.data.data_mix_schedule is not None else None
    if mix is not None:
        of_train = mix
        if config.data.phase_transition_iterations is not None:
            mix.require_phases(config.data.phase_transition_iterations, sizes.final)
        if not (config.checkpoint.may_continue or config.checkpoint.resume == "auto"):
            mix.notes(samples.train)  # an error is raised now, not after the ranks have met
    return RunData(
        tokenizer,
        _weighted(train, config.data, of_train),
        opened.valid,
        opened.test,
        opened.notes,
        verification,
        routing,
        of_train,
        of_valid,
        of_test,
        valid_sets=opened.valid_sets,
        mix=mix,
    )


def routing_records(config: RunConfig, folder: str) -> RoutingRecords:
    """Return the records of routing in a folder, for the network of the run."""
    model = config.model
    layers = tuple(layer.feed_forward == "moe" for layer in model.layers)
    return RoutingRecords(Path(folder), layers, model.num_experts or 0, model.moe_router_topk, _identity(config))


def _outermost_samples(config: RunConfig) -> tuple[int, ...]:
    """Return the numbers of two samples that the run consumes: its first one, and one of its last step.

    The first one is left out if the run may go on from a checkpoint.
    """
    batch_size, given = global_batch_size(config), config.training.train_samples
    # If sizes change, or the last samples do not fill a step, the last step may begin at any of the largest's samples.
    in_steps = last_iteration(config, batch_size) * batch_size.final
    last = in_steps - 1 if given is None else max(given - max(batch_size.sizes), 0)
    return (last,) if config.checkpoint.may_continue else (0, last)


def _identity(config: RunConfig) -> dict[str, Any]:
    """Return what tells a run from others whose samples may differ: its folder, and what decides their order."""
    save, decides = config.checkpoint.save, json.loads(json.dumps(asdict(config.data)))
    return {
        "save": save if save is None or "://" in save else os.path.abspath(save),
        "seed": config.training.seed,
        "data": {name: value for name, value in decides.items() if name not in NOT_OF_THE_SAMPLES},
    }


def open_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the tokenizer from the flags. Raises DataError or ConfigurationError."""
    # A NullTokenizer and a TikTokenizer's .json have as many tokens as they are told.
    has_own_size = config.data.tokenizer_type not in (None, "NullTokenizer", "TikTokenizer")
    grows = config.checkpoint.resize_vocabulary and has_own_size
    return build_tokenizer(config.data, None if grows else config.model.vocab_size)


def open_datasets(
    config: RunConfig, tokenizer: Tokenizer, samples: Samples, verification: Verification
) -> tuple[Datasets[SampleFields], Sequence[object]]:
    """Return the datasets, and those from which training, validation and test take their samples."""
    data, seed = config.data, config.training.seed
    if data.data_mix_schedule is not None:
        mix: MixedSamples = entry_point("scheduled_mix")(data, seed, tokenizer, verification)
        of_others = build_token_datasets(data, samples._replace(train=0), seed, tokenizer, verification)
        mixed = of_others._replace(train=mix)
        return _with_fields(data, seed, tokenizer, mixed), mixed[:3]
    if data.preference_data:
        pairs: Datasets[SampleFields] = entry_point("preference_datasets")(
            data, samples, seed, tokenizer, chat_template(data)
        )
        return pairs, (None, None, None)
    if data.sft and not data.mock_data:
        roles = weighted_roles(loss_weights(data.loss_weights))
        conversations = build_sft_datasets(data, samples, seed, tokenizer, chat_template(data), roles)
        return conversations, conversations[:3]
    if data.mock_data:
        tokens = build_mock_datasets(data, samples, seed, tokenizer)
    else:
        tokens = build_token_datasets(data, samples, seed, tokenizer, verification)
    return _with_fields(data, seed, tokenizer, tokens), tokens[:3]


def _weighted(train: Dataset[SampleFields], data: DataConfig, sources: Sources | None) -> Dataset[SampleFields]:
    """Return the training data with weights of tokens, if there are any.

    Raises ConfigurationError if a name is not of a source.
    """
    if not (given := loss_weights(data.loss_weights)):
        return train
    if data.sft:
        return WeightedDataset(train, weights_of_roles(given))
    return WeightedDataset(train, weights_of_sources(given, sources), sources)


def _sources(taken: object, tokens_per_sample: int) -> SourceTokens | None:
    """Return the sources of a dataset's samples, if it is a blend."""
    if not isinstance(taken, BlendedDataset):
        return None
    return SourceTokens(taken.dataset_index, taken.prefixes, tokens_per_sample)


def chat_template(data: DataConfig) -> ChatTemplate | None:
    """Return the chat template from the flags, or the tokenizer's own.

    Only a Hugging Face tokenizer has its own template, and reads special tokens in one.
    """
    model = data.tokenizer_model if data.tokenizer_type == "HuggingFaceTokenizer" else None
    if data.chat_template is not None:
        return given_template(data.chat_template, model)
    return find_template(model) if model else None


def _with_fields(
    data: DataConfig, seed: int, tokenizer: Tokenizer, datasets: Datasets[np.ndarray]
) -> Datasets[SampleFields]:
    """Return the datasets with labels, positions and masks, with middles of texts cut out if asked for."""
    rules = _fill_in_the_middle(data, tokenizer) if data.fim_data else None

    def with_fields(tokens: Dataset[np.ndarray]) -> FieldsDataset:
        if rules is not None:
            tokens = FillInTheMiddleDataset(tokens, tokenizer, rules, seed)
        return FieldsDataset(
            tokens,
            tokenizer.eod if rules is None else rules.eod,
            data.reset_position_ids,
            data.reset_attention_mask,
            data.eod_mask_loss,
            None if rules is None else rules.pad,
        )

    train, valid, test = (None if each is None else with_fields(each) for each in datasets[:3])
    valid_sets = {name: with_fields(each) for name, each in datasets.valid_sets.items()}
    return Datasets(train, valid, test, datasets.notes, valid_sets)


def _fill_in_the_middle(data: DataConfig, tokenizer: Tokenizer) -> FillInTheMiddle:
    """Return the rules of --fim-data, with the numbers of its tokens.

    Raises ConfigurationError if the tokenizer lacks one of them.
    """

    def token(name: str, text: str) -> int:
        return token_by_name(tokenizer, text, f"--fim-{name}")

    return FillInTheMiddle(
        prefix=token("prefix-token", data.fim_prefix_token),
        middle=token("middle-token", data.fim_middle_token),
        suffix=token("suffix-token", data.fim_suffix_token),
        pad=token("pad-token", data.fim_pad_token),
        eod=tokenizer.eod if data.fim_eod_token is None else token("eod-token", data.fim_eod_token),
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        separator=None if data.fim_split_sample is None else token("split-sample", data.fim_split_sample),
        fragment_rate=data.fim_rate if data.fim_fragment_rate is None else data.fim_fragment_rate,
        no_prefix=data.fim_no_prefix,
    )
