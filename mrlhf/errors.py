"""The errors that mrlhf raises for its users; each is also the builtin error that it resembles.

Every message is one line that says what is wrong and what to do. Our own bugs are `assert`s, not
errors from here. This file does not know the code that raises the errors.
"""

from mrlhf.printable import printable

_MOST_LINES = 38  # of a traceback; with the error's own line, the output has fewer than 40
_MOST_CHARACTERS = 300


class MrlhfError(Exception):
    """Base of every error that a user of mrlhf can cause and correct."""

    def __str__(self) -> str:
        """The message, in which a name or a path of the user shows no control characters."""
        return printable(super().__str__())


class ConfigError(MrlhfError, ValueError):
    """The configuration asks for something impossible or unknown."""


class DataError(MrlhfError, ValueError):
    """A data file is missing, malformed or does not fit the configuration."""


class WeightError(MrlhfError, ValueError):
    """Weights do not fit the model that is to hold them, or could not be handed over."""


class RewardError(MrlhfError, RuntimeError):
    """A reward function cannot be loaded, failed, took too long, or returned no number."""


class EnvironmentFault(MrlhfError, RuntimeError):
    """An environment or a tool cannot be loaded, or no episode of a batch could go on."""


class MethodError(MrlhfError, RuntimeError):
    """A user's own policy loss or advantage estimator raised an error."""


class EngineError(MrlhfError, RuntimeError):
    """The inference engine cannot do what it was asked for."""


class TrainingError(MrlhfError, RuntimeError):
    """Training cannot continue, because its gradients are not usable."""


class MemoryBoundError(MrlhfError, MemoryError):
    """The models and the engine of a rank together need more memory than they may take."""


class CheckpointError(MrlhfError, RuntimeError):
    """A checkpoint is missing, damaged, of another run, or could not be written."""


class Interrupted(MrlhfError):
    """All ranks have agreed to stop, because of a signal or a time limit; the message says why."""


class HangError(MrlhfError, TimeoutError):
    """Ranks have waited for another one for too long."""


class UserTraceback(Exception):
    """The traceback of a user's own code, as text; the cause of the error that names the code."""

    def __init__(self, text: str) -> None:
        """Keep the head and the tail of a long traceback, and the first part of a long line."""
        lines = [line[:_MOST_CHARACTERS] for line in text.rstrip().splitlines()]
        if len(lines) > _MOST_LINES:
            half = _MOST_LINES // 2
            left_out = f"  ... {len(lines) - 2 * half + 1} lines are left out ..."
            lines = [*lines[:half], left_out, *lines[1 - half :]]
        super().__init__("\n".join(lines))

    def __str__(self) -> str:
        return printable(f"\n{self.args[0]}")
