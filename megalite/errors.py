"""Errors that a user can cause, and the exit code of the program for each.

0 finished, 85 stopped and resumable, 93 fatal (do not requeue), 64 bad configuration or input, 70 internal error.
"""

from __future__ import annotations

import re

EXIT_FINISHED = 0
EXIT_CONFIGURATION = 64
EXIT_INTERNAL = 70
EXIT_RESUMABLE = 85
EXIT_FATAL = 93


class MegaliteError(Exception):
    """An error for the person who started the run. Its message says what was wrong, where, and what to do."""

    exit_code = EXIT_FATAL


class ConfigurationError(MegaliteError):
    """A flag, a YAML key or a combination of them is wrong."""

    exit_code = EXIT_CONFIGURATION


class DataError(MegaliteError):
    """A data file or tokenizer is missing, damaged or does not fit the run."""

    exit_code = EXIT_CONFIGURATION


class FileError(MegaliteError):
    """A file cannot be written."""


class CommunicationError(MegaliteError):
    """Another rank has ended or cannot be reached. A restart continues from the last checkpoint."""

    exit_code = EXIT_RESUMABLE


class RendezvousError(CommunicationError):
    """The rendezvous of the ranks failed. The message names the cause."""


class FailedElsewhere(SystemExit):
    """Silent end of a rank after another one has failed and said why. Its code is that of the other rank."""


class CheckpointError(MegaliteError):
    """A checkpoint cannot be written, or cannot be loaded into this run."""

    exit_code = EXIT_FATAL


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged: a file is missing, truncated or changed. An older checkpoint may be intact."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of the program for an error that nothing catches."""
    if isinstance(error, MegaliteError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FINISHED if error.code is None else 1
    if isinstance(error, KeyboardInterrupt | BrokenPipeError):
        return EXIT_RESUMABLE
    return EXIT_CONFIGURATION if isinstance(error, ModuleNotFoundError) else EXIT_INTERNAL


def code_in(word: str, otherwise: int) -> int:
    """Return the exit code in a rank's message "RANK CODE", or `otherwise` if the message is not valid."""
    code = word.split(" ")[1:2]
    return int(code[0]) if code and re.fullmatch(r"[1-9]\d?\d?", code[0], re.ASCII) else otherwise
