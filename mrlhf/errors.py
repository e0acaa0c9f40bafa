"""The errors that mrlhf raises for its users, each also the builtin it resembles.

Every message is one line that says what is wrong and what to do. This file knows nothing of what
raises them; our own bugs are `assert`s, not errors from here.
"""


class MrlhfError(Exception):
    """Base of every error that a user of mrlhf can cause and mend."""


class ConfigError(MrlhfError, ValueError):
    """The configuration asks for something impossible or unknown."""


class DataError(MrlhfError, ValueError):
    """A data file is missing, malformed or does not fit the configuration."""


class WeightError(MrlhfError, ValueError):
    """A checkpoint's tensors do not fit the model that shall hold them."""


class RewardError(MrlhfError, RuntimeError):
    """A reward function cannot be loaded, failed, hung, or returned no number."""


class EngineError(MrlhfError, RuntimeError):
    """The inference engine cannot serve what it was asked for."""


class TrainingError(MrlhfError, RuntimeError):
    """Training cannot go on: its gradients are not usable."""
