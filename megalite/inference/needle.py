"""Needle test: whether a model finds a number that stands once in a long text, by length of the text and by depth.

A sample is a text of filler (the haystack) with one sentence in it that gives a number to a name (the needle), and then
a question that ends where the number must follow. The model is right if each token of the number is the most likely one
after the tokens before it. This is so exactly if greedy generation writes the number, and it takes one forward pass, so
any layout can do it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.null import NullTokenizer
from megalite.errors import ConfigurationError
from megalite.inference.documents import context_of_documents, read_texts, read_token_files
from megalite.inference.network import Network
from megalite.inference.scoring import Window, score_windows
from megalite.process import output

_COLOURS = ["amber", "azure", "crimson", "golden", "indigo", "ivory", "jade", "olive", "purple", "scarlet", "violet"]
_ANIMALS = ["badger", "beaver", "condor", "falcon", "heron", "jackal", "lynx", "marten", "otter", "raven", "walrus"]
_HOW = ["cheerful", "clever", "gentle", "hungry", "old", "patient", "proud", "quiet", "sleepy", "tall", "young"]
_WHO = ["baker", "carpenter", "farmer", "fisherman", "gardener", "miller", "painter", "sailor", "tailor", "teacher"]
_DID = ["carried", "cleaned", "found", "lost", "mended", "painted", "sold", "stored", "wanted", "watched", "weighed"]
_WHAT = ["basket", "boat", "bucket", "chair", "clock", "door", "fence", "ladder", "lamp", "letter", "table", "wheel"]

_SENTENCE = 512
"""Most tokens that the needle moves forward to stand between two sentences."""


@dataclass(frozen=True)
class Haystack:
    """Text for filler. It is repeated where a sample is longer.

    Attributes:
        name: its file; "generated" for sentences made here.
        tokens: [tokens].
        ends: [tokens], true where a sentence or a line ends with a token.
    """

    name: str
    tokens: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, name: str, tokens: np.ndarray, tokenizer: Tokenizer) -> Haystack:
        kinds, places = np.unique(tokens, return_inverse=True)
        texts = (tokenizer.decode([int(kind)]).rstrip(" ") for kind in kinds)
        return cls(name, tokens, np.array([text.endswith((".", "!", "?", "\n")) for text in texts])[places])


def read_haystack(path: str, json_keys: Sequence[str], tokenizer: Tokenizer, verify: bool) -> Haystack:
    """Return the text of a file, or of the token files with this prefix, as filler.

    Args:
        path: the file, as `read_texts` takes it, or a prefix of .bin and .idx files.
        json_keys: the fields of a record that are text.
        tokenizer: the tokenizer of the model.
        verify: compare the checksums of token files.

    Raises:
        ConfigurationError: the tokenizer has no text.
        DataError: a file cannot be read or is damaged.
    """
    _check_text(tokenizer)
    if os.path.exists(f"{path}.idx"):
        (documents,) = read_token_files([path], tokenizer, verify=verify)
    else:
        (documents,) = read_texts([path], json_keys, tokenizer)
    return Haystack.of(path, np.concatenate(documents.tokens), tokenizer)


def generated_haystack(length: int, seed: int, tokenizer: Tokenizer) -> Haystack:
    """Return at least `length` tokens of short sentences, a function of the seed.

    Raises ConfigurationError if the tokenizer has no text.
    """
    _check_text(tokenizer)
    draw, tokens = random.Random(f"{seed}/haystack"), list[int]()
    while len(tokens) < length:
        parts = ([draw.choice(words) for words in (_HOW, _WHO, _DID, _WHAT)] for _ in range(200))
        text = "".join(f" The {how} {who} {did} the {what}." for how, who, did, what in parts)
        tokens += tokenizer.encode(text)
    return Haystack.of("generated", np.array(tokens, np.int64), tokenizer)


def _check_text(tokenizer: Tokenizer) -> None:
    if isinstance(tokenizer, NullTokenizer):
        raise ConfigurationError(
            "--needle-lengths: the model has a NullTokenizer, which has no text for a needle: name the tokenizer that "
            "made its data in the run that trains it (--tokenizer-type)"
        )


def needle_window(tokenizer: Tokenizer, haystack: Haystack, length: int, depth: float, draw: random.Random) -> Window:
    """Return a sample of which the model reads `length` tokens, and whose number is what counts.

    The number has the same tokens in the needle and behind the question, because its text is encoded by itself.

    Args:
        tokenizer: the tokenizer of the model.
        haystack: the filler, from a random place on.
        length: number of tokens: all but the last one of the number.
        depth: place of the needle: 0 before the filler, 1 behind it, and between these after the last sentence that
            ends before this share of its tokens.
        draw: the source of the name, the number and the beginning of the filler.

    Raises:
        ConfigurationError: the length is too short for the needle and the question.
    """
    name, number = f"{draw.choice(_COLOURS)} {draw.choice(_ANIMALS)}", draw.randrange(10**6, 10**7)
    answer = tokenizer.encode(f" {number}")
    needle = [*tokenizer.encode(f" The number of the {name} is"), *answer, *tokenizer.encode(".")]
    question = tokenizer.encode(
        f"\nQuestion: what number does the text give to the {name}?\nAnswer: the number of the {name} is"
    )
    context = context_of_documents(tokenizer)
    room = length + 1 - sum(map(len, (context, needle, question, answer)))
    if room < 0:
        raise ConfigurationError(
            f"--needle-lengths {length}: the needle and its question alone take {length - room} tokens of this model"
        )
    places = (draw.randrange(len(haystack.tokens)) + np.arange(room)) % len(haystack.tokens)
    filler, cut = haystack.tokens[places], _between_sentences(haystack.ends[places], round(depth * room))
    parts = (context, filler[:cut], needle, filler[cut:], question, answer)
    return Window(np.concatenate([np.asarray(part, np.int64) for part in parts]), len(answer))


def _between_sentences(ends: np.ndarray, place: int) -> int:
    """Return the place after the last end of a sentence before a place; the place itself if none is near."""
    first = max(place - _SENTENCE, 0)
    near = np.flatnonzero(ends[first:place])
    return first + int(near[-1]) + 1 if len(near) else place


@dataclass(frozen=True)
class NeedleScore:
    """Result for samples of one length with the needle at one depth."""

    length: int
    """Number of tokens that the model reads."""
    depth: float
    """Share of the filler that stands before the needle."""
    trials: int
    """Number of samples."""
    found: float
    """Share of samples whose number the model continues with."""
    log_probability: float
    """Mean of the natural logarithm of the number's probability."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def find_needles(
    network: Network,
    tokenizer: Tokenizer,
    haystack: Haystack,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
    micro_batch_size: int,
    advance: Callable[[int], None],
) -> list[NeedleScore]:
    """Return the result for each length and depth. All ranks call it, and get the same under every layout.

    Args:
        network: the model.
        tokenizer: its tokenizer.
        haystack: text for filler.
        lengths: numbers of tokens that the model reads.
        depths: places of the needle, as shares of the filler.
        trials: number of samples for each length and depth.
        seed: the samples are a function of it, their length, their depth and their number.
        micro_batch_size: number of samples per forward; the results do not depend on it.
        advance: is called with numbers of finished samples.

    Raises:
        ConfigurationError: a length is too short for the needle and the question.
    """
    found = []
    for length in lengths:
        windows = [
            needle_window(tokenizer, haystack, length, depth, random.Random(f"{seed}/{length}/{depth}/{trial}"))
            for depth in depths
            for trial in range(trials)
        ]
        scores = score_windows(network, windows, micro_batch_size)
        advance(len(windows))
        for number, depth in enumerate(depths):
            those = scores[number * trials : (number + 1) * trials]
            probability = math.fsum(score.log_probability for score in those) / trials
            found.append(NeedleScore(length, depth, trials, sum(score.greedy for score in those) / trials, probability))
    return found


def needle_table(scores: Sequence[NeedleScore]) -> str:
    """Return the shares that were found as a table with a line per length and a column per depth."""
    depths = list(dict.fromkeys(score.depth for score in scores))
    shares = {(score.length, score.depth): f"{score.found:.2f}" for score in scores}
    rows = [
        (f"{length:,}", *(shares[length, depth] for depth in depths))
        for length in dict.fromkeys(score.length for score in scores)
    ]
    return "\n".join(output.table(("length", *(f"found at {depth:g}" for depth in depths)), rows))
