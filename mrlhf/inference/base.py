"""What every inference engine can do, and the types that go in and come out.

A backend is anything that fits `InferenceEngine`. This file knows no backend, no model and no batch of the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mrlhf.errors import ConfigError
from mrlhf.weights.shard import Piece, Slot


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How responses are drawn.

    Attributes:
        n: samples a prompt.
        temperature: logits are divided by this; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens, ties with the k-th included; -1 is off.
        top_p: draw from the fewest likeliest tokens that together have this probability; 1 is off.
        max_tokens: longest response, tokens.
        stop_token_ids: a response ends after any of these; the stop token is part of it.
        seed: together with prompt uid, sample index and position it fixes every random number. A prompt that comes
            again under the same seed gets the same numbers, so training mixes the step into it.
    """

    n: int = 1
    temperature: float
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    seed: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ConfigError(f"n {self.n} and max_tokens {self.max_tokens} must each be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k} must be -1 (off) or at least 1")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} must be above 0 and at most 1 (off)")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed {self.seed} must be from 0 to 2**63 - 1")


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        prompt_index: which of the prompts it answers.
        sample_index: which of the prompt's n samples it is.
        token_ids: the response, stop token included.
        logprobs: of each token, at the sampling temperature (1 if greedy), over the whole vocabulary: before top-k and
            top-p.
        stopped: a stop token ended it; otherwise the length limit did.
    """

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logprobs: list[float]
    stopped: bool


class InferenceEngine(Protocol):
    """A generator of text whose weights are written from outside.

    The order of a step: `wake`, then `bind` or fill `weight_slots`, then `commit`, then `generate`, then `sleep`. All
    ranks of one replica make the same calls with the same arguments.
    """

    @property
    def version(self) -> int:
        """The version of the weights, as last committed."""
        ...

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Which named slices each parameter of this rank holds; costs no memory."""
        ...

    def weight_slots(self) -> list[Slot]:
        """Where each named slice is stored, to be filled in place; storage is made for what is not bound."""
        ...

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Make `tensor` itself the engine's parameter; nothing is copied."""
        ...

    def commit(self, version: int) -> None:
        """The weights are complete and are `version`; whatever was computed from older ones is dropped."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], uids: Sequence[int], sampling: SamplingParams) -> list[Sample]:
        """Answer token-id `prompts`; the result is ordered by prompt, then by sample."""
        ...

    def sleep(self) -> None:
        """Free all device memory but the weights."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...
