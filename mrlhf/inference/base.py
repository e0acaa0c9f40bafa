"""What every inference engine can do, and the types that go in and come out.

A backend is anything that fits `InferenceEngine`. This file knows no backend, no model and no batch
of the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mrlhf.errors import ConfigError
from mrlhf.weights.shard import Piece, Slot

# Below it, logits divided by the temperature leave the range of float32.
MIN_TEMPERATURE = 1e-6


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
        stop: a response ends after the token with which its text first contains any of these
            strings.
        seed: together with prompt uid, sample index and position it fixes every random number. A
            prompt that comes again under the same seed gets the same numbers, so training mixes the
            step into it.
    """

    n: int = 1
    temperature: float
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ConfigError(
                f"n {self.n} and max_tokens {self.max_tokens} must each be at least 1"
            )
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature {self.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}"
            )
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k} must be -1 (off) or at least 1")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} must be above 0 and at most 1 (off)")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed {self.seed} must be from 0 to 2**63 - 1")
        if "" in self.stop:
            raise ConfigError(
                "stop holds an empty string, which every response contains; remove it"
            )


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        prompt_index: which of the prompts it answers.
        sample_index: which of the prompt's n samples it is.
        token_ids: the response, stop token included.
        logprobs: of each token, at the sampling temperature (1 if greedy), over the whole
            vocabulary: before top-k and top-p.
        stopped: a stop token or stop string ended it; otherwise the length limit did.
    """

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logprobs: list[float]
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How much an engine may take at once.

    Attributes:
        max_num_seqs: sequences that are decoded at once.
        max_length: longest prompt and response together, tokens.
        max_prefill_tokens: prompt tokens computed in one step; longer prompts are computed in
            chunks.
        block_size: tokens of a block of the KV cache; None for what the device's kernels like best.
        cache_bytes: of the KV cache of one rank; None for what `gpu_memory_utilization` leaves on a
            GPU, and elsewhere for up to half of the free memory, shared with the other processes of
            the machine.
        gpu_memory_utilization: share of a GPU's memory that may be in use, everything counted, with
            the KV cache.
        enforce_eager: capture no CUDA graphs.
    """

    max_num_seqs: int
    max_length: int
    max_prefill_tokens: int
    block_size: int | None = None
    cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False


@dataclass(frozen=True)
class EngineStats:
    """What one call of `generate` did on this rank.

    Attributes:
        steps: passes through the model.
        prompt_tokens: tokens of all prompts, each prompt counted once a sample.
        computed_prompt_tokens: prompt tokens that were computed; the others shared a computed
            prefix.
        generated_tokens: tokens of all responses.
        preemptions: sequences that lost their blocks and were computed again.
        cache_bytes: of the KV cache.
        peak_cache_bytes: of the blocks in use when most were.
    """

    steps: int
    prompt_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    cache_bytes: int
    peak_cache_bytes: int


class InferenceEngine(Protocol):
    """A generator of text whose weights are written from outside.

    The order of a step: `wake`, then `bind` or fill `weight_slots`, `take_cache` while they are
    being filled, then `commit`, then `generate`, then `sleep`. All ranks of one replica make the
    same calls with the same arguments.
    """

    @property
    def version(self) -> int:
        """The version of the weights, as last committed."""
        ...

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Which named slices each parameter of this rank holds; costs no memory."""
        ...

    def weight_slots(self) -> list[Slot]:
        """Where each named slice is stored, to be filled in place; storage is made for what is not
        bound.
        """
        ...

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Make `tensor` itself the engine's parameter; nothing is copied."""
        ...

    def commit(self, version: int) -> None:
        """The weights are complete and are `version`; whatever was computed from older ones is
        dropped.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        uids: Sequence[int],
        sampling: SamplingParams,
        samples: Sequence[range] | None = None,
    ) -> list[Sample]:
        """Answer token-id `prompts`; the result is ordered by prompt, then by sample.

        `samples` says which sample indices of each prompt to draw: `range(sampling.n)` of each
        where None.
        """
        ...

    def stats(self) -> EngineStats:
        """What the last call of `generate` did."""
        ...

    def sleep(self) -> None:
        """Free all device memory but the weights."""
        ...

    def wake(self) -> None:
        """Undo `sleep`, so that weights can arrive."""
        ...

    def take_cache(self) -> None:
        """Take the memory of the KV cache, if that need not wait for `commit` or `generate`; waits
        for no rank.
        """
        ...
