"""Errors a user can cause, each with the exit code the program ends with.

0 finished, 85 stopped and resumable, 93 fatal (do not requeue), 64 bad configuration or input, 70 internal error.
"""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_CONFIGURATION = 64
EXIT_INTERNAL = 70
EXIT_RESUMABLE = 85
EXIT_FATAL = 93


class MegaliteError(Exception):
    """An error whose message is for the person who started the run: what was wrong, where, what to do."""

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
    """Another rank has gone or cannot be reached. Started again, the run continues from its last checkpoint."""

    exit_code = EXIT_RESUMABLE


class RendezvousError(CommunicationError):
    """The ranks have not come together; it is known, and said, which one is the cause."""


class CheckpointError(MegaliteError):
    """A checkpoint cannot be written, or cannot be loaded into this run."""

    exit_code = EXIT_FATAL


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is not as it was written: a file is missing, cut off or changed. An older one may be whole."""


def exit_code_of(error: BaseException) -> int:
    """Return the code that the program ends with for an error that nothing catches."""
    if isinstance(error, MegaliteError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FINISHED if error.code is None else 1
    if isinstance(error, KeyboardInterrupt | BrokenPipeError):
        return EXIT_RESUMABLE
    return EXIT_CONFIGURATION if isinstance(error, ModuleNotFoundError) else EXIT_INTERNAL
