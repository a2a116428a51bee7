"""File of the reference's log-probabilities of all responses, so that training does not hold the reference.

It knows the reference by what it computes, with which weights: new ones at the same path are another reference, and the
same ones are the same wherever they are, under any layout.
"""

from __future__ import annotations

import json
import zlib

import numpy as np
import torch

from megalite.checkpoint.compatibility import function_of
from megalite.checkpoint.fingerprint import fingerprint
from megalite.config import RunConfig
from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError
from megalite.extras.post_training.pairs import open_pairs
from megalite.extras.post_training.reference import FrozenNetwork
from megalite.parallel import collectives
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.mesh import ParallelMesh
from megalite.small_files import parse_json
from megalite.storage import open_directory, read_small, write_atomically
from megalite.training.data import chat_template

NAME = "reference_log_probabilities"
_VALUES = np.dtype("<f8")
_LARGEST_LINE = 1 << 16
"""Largest line of JSON in bytes."""


def identity(reference: FrozenNetwork, mesh: ParallelMesh) -> str:
    """Return a text that two references have in common only if they are the same. Called by all ranks together."""
    function = function_of(reference.config)
    if any(recipes := [each and each.recipe.name for each in reference.roundings.of_layers]):
        function = {**function, "recipes": recipes}
    described = json.dumps(function, sort_keys=True).encode()
    return f"{fingerprint(reference.optimizer, mesh)} {zlib.crc32(described):08x}"


class ReferenceFile:
    """A line of JSON that says whose values they are, then the values, little-endian float64.

    Attributes:
        files: the files of pairs by path.
        count: number of their responses.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        data, options = config.data, config.preferences
        assert options.reference_log_probabilities is not None
        self._given = options.reference_log_probabilities
        self._path = open_directory(self._given) / NAME
        seed = 0  # whatever that of the run is: an unfinished file counts samples
        self.files = open_pairs(data, seed, tokenizer, chat_template(data))
        self.count = sum(map(len, self.files.values()))
        self._model = options.reference_model
        self._longest = data.seq_length
        """Pairs that are longer have no values."""
        self._of_data = [file.description for file in self.files.values()]

    def read(self, reference: str | None, mesh: ParallelMesh) -> tuple[np.ndarray, int | None]:
        """Return the values by the number of the response, on all ranks, and how many samples have theirs; None: all.

        Rank 0 reads it. All ranks call it together. `reference`: its identity; None if there is none.

        Raises ConfigurationError if it is of other pairs or of another reference, or damaged, or if it is missing or
        unfinished and there is no reference to compute it with.
        """
        values, scored = np.zeros(self.count), None
        with raise_on_all_ranks(mesh, None):
            if mesh.rank == 0:
                values, scored = self._read(reference)
        scored = collectives.all_gather_json(scored, mesh)[0]
        if scored is not None and reference is None:
            raise ConfigurationError(
                f"--reference-log-probabilities {self._given} has no {'finished ' * bool(scored)}file {NAME}: give "
                "--reference-model, the model to compute it with"
            )
        shared = torch.from_numpy(values).to(mesh.device)
        return collectives.all_reduce_(shared, mesh.world()).cpu().numpy(), scored

    def _read(self, reference: str | None) -> tuple[np.ndarray, int | None]:
        """Return the values, which are zeros if there is no file, and the number of samples as `read` does.

        Raises ConfigurationError.
        """
        try:
            largest = self.count * _VALUES.itemsize + _LARGEST_LINE
            line, _, body = read_small(self._path, largest=largest).partition(b"\n")
            told = parse_json(line)
            of, known, longest = told["pairs"], told["reference"], told["longest"]
            scored = told.get("scored")
            is_whole = told["crc32"] == zlib.crc32(body, scored or 0) and len(body) == self.count * _VALUES.itemsize
            is_whole = is_whole and bool(np.isfinite(np.frombuffer(body, _VALUES)).all())
            is_whole = is_whole and (scored is None or (type(scored) is int and scored > 0))
            fits = longest >= self._longest if scored is None else longest == self._longest  # which makes the samples
        except FileNotFoundError:
            return np.zeros(self.count), 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{self._path} is damaged: remove it, and it is computed again") from error
        if of != self._of_data or not fits:
            raise ConfigurationError(
                f"{self._path} is of other pairs, or of another tokenizer, chat template or --seq-length: "
                "give another directory as --reference-log-probabilities"
            )
        if reference not in (None, known):
            raise ConfigurationError(
                f"{self._path} is of another model than --reference-model {self._model} is now, or of another "
                "precision: give another directory as --reference-log-probabilities"
            )
        if not is_whole:
            raise ConfigurationError(f"{self._path} is damaged: remove it, and it is computed again")
        return np.frombuffer(body, _VALUES).astype(np.float64), scored

    def write(self, values: np.ndarray, reference: str, mesh: ParallelMesh, *, scored: int | None = None) -> None:
        """Write the values of the reference with this identity, on rank 0. All ranks call it together.

        `scored`: the number of the first samples, of all files, whose responses have theirs; None: all.
        """
        with raise_on_all_ranks(mesh, f"writing {self._path}"):
            if mesh.rank == 0:
                body = values.astype(_VALUES).tobytes()
                told = {"pairs": self._of_data, "reference": reference, "longest": self._longest, "scored": scored}
                line = json.dumps({**told, "crc32": zlib.crc32(body, scored or 0)}).encode()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, line + b"\n" + body)
