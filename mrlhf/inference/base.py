"""The protocol of an inference engine with its types.

A backend is any class that fits `InferenceEngine`. This file knows no backend, no model and no
batch of the trainer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray
from torch import Tensor

from mrlhf.errors import ConfigError
from mrlhf.weights.shard import Piece, Slot

# Logits divided by a lower temperature leave the range of float32.
MIN_TEMPERATURE = 1e-6

N = TypeVar("N", int, float)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How responses are drawn.

    Attributes:
        n: number of samples for each prompt.
        temperature: logits are divided by this; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens and those that tie with the k-th; -1 is off.
        top_p: draw from the fewest likeliest tokens that together have this probability; 1 is off.
        min_p: draw from tokens with at least this share of the likeliest one's probability; 0 is
            off.
        max_tokens: length of the longest response, in tokens.
        stop_token_ids: a response ends after any of these; the stop token is part of it.
        stop: a response ends after the token with which its text first contains any of these
            strings.
        seed: fixes every random number, together with prompt uid, sample index and position. A
            prompt that comes again with the same seed gets the same numbers, so training mixes the
            step into the seed.
        record_experts: whether samples record the experts of their tokens; only the native engine
            does so, for models with mixtures.
        record_masks: whether samples record which tokens top_k, top_p and min_p let through.
            Log-probabilities are then over these.
        record_head: how many of the likeliest tokens samples record at each place, with their
            log-probabilities; 0 records none.
    """

    n: int = 1
    temperature: float
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int
    record_experts: bool = False
    record_masks: bool = False
    record_head: int = 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from only a part of the distribution."""
        return self.top_k != -1 or self.top_p < 1 or self.min_p > 0

    def without_records(self) -> SamplingParams:
        """The same, where nothing is recorded that only training needs."""
        return replace(self, record_experts=False, record_masks=False, record_head=0)

    def greedy(self) -> SamplingParams:
        """One response of the likeliest tokens, which ends as these do."""
        whole = replace(self.without_records(), top_k=-1, top_p=1.0, min_p=0.0)
        return replace(whole, n=1, temperature=0.0)

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
        assert self.truncates or not self.record_masks, "there is nothing to record"
        assert self.record_masks or not (self.truncates and self.record_head), "no masks"
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p {self.min_p} must be from 0 (off) to 1")

        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed {self.seed} must be from 0 to 2**63 - 1")
        if "" in self.stop:
            raise ConfigError(
                "stop holds an empty string, which every response contains; remove it"
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and the samples to draw for it.

    The requests that are in flight together share how a token is drawn and what ends a response:
    temperature, top_k, top_p, min_p, stop_token_ids and stop. Each may have its own max_tokens and
    seed.

    Attributes:
        id: the caller's number or tuple for the request, which its samples carry; unique among the
            requests in flight.
        prompt: token ids, at least one.
        uid: the prompt's number, on which the random numbers depend: equal uids draw equal numbers.
        samples: the sample indices to draw.
        sampling: how to draw them. Its `n` is for callers; an engine draws `samples`.
        goes_on: whether a later request begins with this prompt and a response to it, as in a
            conversation; an engine may keep what it has computed of both, while it has room.
        drawn: how many tokens at the end of the prompt belong to the response already, so that the
            request draws its rest: their places and text count for random numbers and stop strings.
    """

    id: Any
    prompt: Sequence[int]
    uid: int
    samples: range
    sampling: SamplingParams
    goes_on: bool = False
    drawn: int = 0


class _PackedList(Generic[N]):
    """A field of a dataclass that reads as a list of numbers, and is kept as an array.

    The array takes a tenth of the list's memory.
    """

    def __init__(self, typecode: Literal["i", "f"]) -> None:
        self._typecode = typecode

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> list[N]:
        """Return a new list for each caller."""
        if instance is None:
            raise AttributeError(self._name)  # so that dataclasses see a field without a default
        numbers: list[N] = vars(instance)[self._name].tolist()
        return numbers

    def __set__(self, instance: object, numbers: Sequence[N]) -> None:
        vars(instance)[self._name] = array(self._typecode, numbers)


class MaskWords(NamedTuple):
    """What is recorded of the distribution at each place of a response, as in `SamplingMasks`."""

    words: array[int]  # int32, of all places
    counts: array[int]  # int32, words of each place

    @staticmethod
    def none(places: int) -> MaskWords:
        """Places of which nothing is recorded."""
        return MaskWords(array("i"), array("i", bytes(4 * places)))


@dataclass(frozen=True)
class Sample:
    """One response.

    Each access to `token_ids` or `logprobs` makes a new list; `arrays` does not.

    Attributes:
        request_id: the request that it answers.
        sample_index: which of the request's samples it is.
        token_ids: the response, stop token included.
        logprobs: the log-probability of each token, at the sampling temperature (1 if greedy), over
            the whole vocabulary: before any is cut off, and with the tokens that the engine never
            draws. With `masks` it is over the tokens that could be drawn.
        stopped: whether a stop token or stop string ended it; otherwise the length limit did.
        version: the version of the weights that drew it.
        experts: the experts of each token, uint8 or int16 [tokens, mixtures, per_token], prompt
            included; the last token is not computed and has none. None if they were not asked for,
            and on all ranks of a replica but the first.
        masks: the tokens that could be drawn, and the likeliest; None if neither was asked for.
    """

    request_id: Any
    sample_index: int
    token_ids: _PackedList[int] = _PackedList("i")
    logprobs: _PackedList[float] = _PackedList("f")
    # mypy takes the two for defaults, which they are not.
    stopped: bool  # type: ignore[misc]
    version: int  # type: ignore[misc]
    experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    masks: MaskWords | None = field(default=None, repr=False)

    @property
    def arrays(self) -> tuple[array[int], array[float]]:
        """Token ids in int32 and log-probabilities in float32, as they are stored."""
        return vars(self)["token_ids"], vars(self)["logprobs"]


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The most that an engine may take at once.

    Attributes:
        max_num_seqs: number of sequences that are decoded at once.
        max_length: length of the longest prompt and response together, in tokens.
        max_prefill_tokens: number of prompt tokens computed in one step; longer prompts are
            computed in chunks.
        block_size: tokens in one block of the KV cache; None for the best size for the device's
            kernels.
        cache_bytes: size of one rank's KV cache. None takes what `gpu_memory_utilization` leaves on
            a GPU; elsewhere up to half of the free memory, shared with the other processes of the
            machine.
        gpu_memory_utilization: share of a GPU's memory for the engine's weights and KV cache;
            training's own memory may leave less, see `gpu_room`.
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
    """The engine's work on this rank since results were last collected."""

    steps: int = 0  # passes through the model
    # tokens in the prompts of the collected samples, each prompt counted once a sample
    prompt_tokens: int = 0
    # prompt tokens that were computed; the others shared a computed prefix
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0  # tokens in the collected samples
    # number of times that a sequence lost its blocks and had to be computed again
    preemptions: int = 0
    cache_bytes: int = 0  # size of the KV cache
    peak_cache_bytes: int = 0  # the largest size of the blocks in use

    def __add__(self, later: EngineStats) -> EngineStats:
        """Add the counts, and take the larger of the sizes."""
        return EngineStats(
            steps=self.steps + later.steps,
            prompt_tokens=self.prompt_tokens + later.prompt_tokens,
            computed_prompt_tokens=self.computed_prompt_tokens + later.computed_prompt_tokens,
            generated_tokens=self.generated_tokens + later.generated_tokens,
            preemptions=self.preemptions + later.preemptions,
            cache_bytes=max(self.cache_bytes, later.cache_bytes),
            peak_cache_bytes=max(self.peak_cache_bytes, later.peak_cache_bytes),
        )


@dataclass(frozen=True)
class Finished:
    """Samples that have ended, and the engine's work meanwhile."""

    samples: list[Sample]
    stats: EngineStats


class HeldBytes(NamedTuple):
    """Bytes of an engine on one rank."""

    weights: int  # without those that are bound
    cache: int  # of keys and values


class InferenceEngine(Protocol):
    """A generator of text whose weights are written from outside.

    First the weights: call `wake`, then `bind` or fill `weight_slots`, call `take_cache` while they
    are being filled, then `commit`. Then the samples: `submit` requests, and call `step` and
    `collect` until nothing is in flight (see `generate`). At the end call `sleep`.

    All ranks of one replica make the same calls with the same arguments. So a decision that depends
    on one rank alone, such as a signal that it got, must be agreed on before it changes a call.
    """

    @property
    def version(self) -> int:
        """The version of the weights that was last committed."""
        ...

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Return the named slices that each parameter of this rank holds; costs no memory."""
        ...

    def weight_slots(self) -> list[Slot]:
        """Return where each named slice is stored, to be filled in place.

        A parameter that is not bound gets storage.
        """
        ...

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Make `tensor` itself the engine's parameter; nothing is copied."""
        ...

    def keeps(self, tensor: str) -> bool:
        """Whether the engine keeps a named tensor, one never trained, for all versions."""
        ...

    def commit(self, version: int) -> None:
        """Declare the weights complete as `version`, and drop what was computed with older ones.

        Raises:
            EngineError: a parameter has no weights, or samples are in flight.
        """
        ...

    @property
    def in_flight(self) -> int:
        """The number of samples that were submitted and not yet collected."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, also while others are in flight; it need not run a step.

        Raises:
            EngineError: the engine cannot answer one of them; then none is queued.
        """
        ...

    def step(self) -> None:
        """Run one pass, if a sample is left to compute; an error drops all that is in flight."""
        ...

    def collect(self) -> Finished:
        """Return the samples that have ended, in an order that is the same on all ranks."""
        ...

    def cancel(self) -> Finished:
        """Drop the samples that have not ended, and return those that have."""
        ...

    def sleep(self, free_weights: bool = False) -> None:
        """Free all device memory but the weights.

        With `free_weights` an engine may free those that are not bound, too; then all weights must
        come again before the next `commit`.

        Raises:
            EngineError: samples are in flight.
        """
        ...

    def wake(self) -> None:
        """Undo `sleep`, so that weights can arrive."""
        ...

    @property
    def held_bytes(self) -> HeldBytes:
        """The bytes that this rank's part of the engine holds on the device now."""
        ...

    def take_cache(self) -> None:
        """Take the KV cache's memory, if `commit` need not come first; it waits for no rank."""
        ...


def response_so_far(request: Request) -> Sequence[int]:
    """Return the tokens at the end of the prompt that belong to the response."""
    return request.prompt[len(request.prompt) - request.drawn :]
