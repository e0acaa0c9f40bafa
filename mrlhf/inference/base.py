"""What every inference engine can do, and `generate`, the loop that runs any of them.

The types that go in and come out are here too. A backend is any class that fits `InferenceEngine`.
This file knows no backend, no model and no batch of the trainer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from numpy.typing import NDArray
from torch import Tensor

from mrlhf.errors import ConfigError, EngineError
from mrlhf.weights.shard import Piece, Slot

# Below it, logits divided by the temperature leave the range of float32.
MIN_TEMPERATURE = 1e-6

N = TypeVar("N", int, float)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How responses are drawn.

    Attributes:
        n: number of samples for each prompt.
        temperature: logits are divided by this; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens; ties with the k-th are included; -1 is off.
        top_p: draw from the fewest likeliest tokens that together have this probability; 1 is off.
        max_tokens: length of the longest response, in tokens.
        stop_token_ids: a response ends after any of these; the stop token is part of it.
        stop: a response ends after the token with which its text first contains any of these
            strings.
        seed: fixes every random number, together with prompt uid, sample index and position. A
            prompt that comes again with the same seed gets the same numbers, so training mixes the
            step into the seed.
        record_experts: whether samples say to which experts their tokens were sent; the native
            engine does so, of models with mixtures.
    """

    n: int = 1
    temperature: float
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int
    record_experts: bool = False

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


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and the samples that are wanted of it.

    The requests that are in flight together share how a token is drawn and what ends a response:
    temperature, top_k, top_p, stop_token_ids and stop. Each may have its own max_tokens and seed.

    Attributes:
        id: the caller's number for the request, which its samples carry. No two requests in flight
            have the same.
        prompt: token ids, at least one.
        uid: the prompt's number, on which the random numbers depend: equal uids draw equal numbers.
        samples: the sample indices to draw.
        sampling: how to draw them. `requests_for` reads its `n`; an engine draws `samples` and does
            not read it.
    """

    id: int
    prompt: Sequence[int]
    uid: int
    samples: range
    sampling: SamplingParams


class _PackedList(Generic[N]):
    """A field of a dataclass: a list of numbers to whoever reads it, kept as an array.

    The array takes a tenth of the list's memory.
    """

    def __init__(self, typecode: Literal["i", "f"]) -> None:
        """Keep numbers of 4 bytes each, whole ones or not."""
        self._typecode = typecode

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn the name of the field."""
        self._name = name

    def __get__(self, instance: object, owner: type) -> list[N]:
        """A list of its own for each caller."""
        if instance is None:
            raise AttributeError(self._name)  # so that dataclasses see a field without a default
        numbers: list[N] = vars(instance)[self._name].tolist()
        return numbers

    def __set__(self, instance: object, numbers: Sequence[N]) -> None:
        """Take a copy of `numbers`."""
        vars(instance)[self._name] = array(self._typecode, numbers)


@dataclass(frozen=True)
class Sample:
    """One response.

    Each look at `token_ids` or `logprobs` makes a new list; `arrays` has the numbers without one.

    Attributes:
        request_id: the request that it answers.
        sample_index: which of the request's samples it is.
        token_ids: the response, stop token included.
        logprobs: the log-probability of each token, at the sampling temperature (1 if greedy), over
            the whole vocabulary, before top-k and top-p, and with the tokens that the engine never
            draws.
        stopped: whether a stop token or stop string ended it; otherwise the length limit did.
        version: the version of the weights that drew it.
        experts: uint8 or int16 [tokens, mixtures, per_token], the experts to which each token was
            sent, prompt included, but for the last token, which is not computed; None if that was
            not asked for, and on the ranks of a replica beside its first.
    """

    request_id: int
    sample_index: int
    token_ids: _PackedList[int] = _PackedList("i")
    logprobs: _PackedList[float] = _PackedList("f")
    # mypy takes the two for defaults, which they are not.
    stopped: bool  # type: ignore[misc]
    version: int  # type: ignore[misc]
    experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)

    @property
    def arrays(self) -> tuple[array[int], array[float]]:
        """Token ids and log-probabilities as they are kept, in int32 and float32."""
        return vars(self)["token_ids"], vars(self)["logprobs"]


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How much an engine may take at once.

    Attributes:
        max_num_seqs: number of sequences that are decoded at once.
        max_length: length of the longest prompt and response together, in tokens.
        max_prefill_tokens: number of prompt tokens computed in one step; longer prompts are
            computed in chunks.
        block_size: tokens in one block of the KV cache; None for what suits the device's kernels
            best.
        cache_bytes: size of one rank's KV cache. None takes what `gpu_memory_utilization` leaves on
            a GPU; elsewhere up to half of the free memory, shared with the other processes of the
            machine.
        gpu_memory_utilization: share of a GPU's memory for the engine's weights and KV cache, of
            which training's own memory may leave less; see `gpu_room`.
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
    """What the engine did on this rank since results were last collected.

    Attributes:
        steps: number of passes through the model.
        prompt_tokens: tokens in the prompts of the collected samples, each prompt counted once a
            sample.
        computed_prompt_tokens: prompt tokens that were computed; the others shared a computed
            prefix.
        generated_tokens: tokens in the collected samples.
        preemptions: number of times that a sequence lost its blocks and had to be computed again.
        cache_bytes: size of the KV cache.
        peak_cache_bytes: size of the blocks in use when most were.
    """

    steps: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cache_bytes: int = 0
    peak_cache_bytes: int = 0

    def __add__(self, later: EngineStats) -> EngineStats:
        """Both together: counts are added, and of the sizes the larger is taken."""
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
    """Samples that have ended, and what the engine did meanwhile."""

    samples: list[Sample]
    stats: EngineStats


class InferenceEngine(Protocol):
    """A generator of text whose weights are written from outside.

    The weights come first: call `wake`, then `bind` or fill `weight_slots`, call `take_cache` while
    they are being filled, then `commit`. Then samples are drawn: `submit` requests, and call `step`
    and `collect` until nothing is in flight (see `generate`). `sleep` ends the use.

    All ranks of one replica make the same calls with the same arguments. So a decision that depends
    on one rank alone, such as a signal that it got, must be agreed on before it changes a call.
    """

    @property
    def version(self) -> int:
        """The version of the weights, as last committed."""
        ...

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Which named slices each parameter of this rank holds; costs no memory."""
        ...

    def weight_slots(self) -> list[Slot]:
        """Where each named slice is stored, to be filled in place.

        A parameter that is not bound gets storage.
        """
        ...

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Make `tensor` itself the engine's parameter; nothing is copied."""
        ...

    def commit(self, version: int) -> None:
        """Declare the weights complete as `version`, and drop what older ones have computed.

        Raises:
            EngineError: a parameter has no weights, or samples are in flight.
        """
        ...

    @property
    def in_flight(self) -> int:
        """The number of samples that were submitted and are not collected yet."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, also while others are in flight; it may run no step.

        Raises:
            EngineError: the engine cannot answer one of them; then none is queued.
        """
        ...

    def step(self) -> None:
        """Run one pass through the model; without a sample to compute, do nothing.

        If it raises, everything in flight is dropped, and the engine can be used again.
        """
        ...

    def collect(self) -> Finished:
        """Hand over the samples that have ended, in an order that is the same on all ranks."""
        ...

    def cancel(self) -> Finished:
        """Drop the samples that have not ended, and hand over those that have."""
        ...

    def sleep(self) -> None:
        """Free all device memory but the weights.

        Raises:
            EngineError: samples are in flight.
        """
        ...

    def wake(self) -> None:
        """Undo `sleep`, so that weights can arrive."""
        ...

    def take_cache(self) -> None:
        """Take the memory of the KV cache, if that need not wait for `commit` or `submit`.

        It waits for no other rank.
        """
        ...


def requests_for(
    prompts: Sequence[Sequence[int]],
    uids: Sequence[int],
    sampling: SamplingParams,
    samples: Sequence[range] | None = None,
) -> list[Request]:
    """One request for each prompt, numbered from 0.

    Args:
        prompts: token ids.
        uids: the number of each prompt, on which its random numbers depend.
        sampling: how to draw.
        samples: which sample indices of each prompt to draw; None draws all `sampling.n` of each.
    """
    if samples is None:
        samples = [range(sampling.n)] * len(prompts)
    rows = enumerate(zip(prompts, uids, samples, strict=True))
    return [
        Request(id=number, prompt=prompt, uid=uid, samples=indices, sampling=sampling)
        for number, (prompt, uid, indices) in rows
    ]


def generate(
    engine: InferenceEngine,
    requests: Sequence[Request],
    may_begin: Callable[[int], bool] | None = None,
) -> Finished:
    """Answer `requests`: submit them, and step until all samples are collected.

    Args:
        engine: has nothing in flight.
        requests: what to answer.
        may_begin: is asked before each step, with the step's number from 0; if it says False, the
            samples that have not ended are dropped. All ranks of a replica must get the same
            answers. None: always True.

    Returns:
        The samples in the order of the requests, then by sample index, and the statistics of the
        whole call.

    Raises:
        EngineError: samples of others are in flight, or the engine refuses or fails. Then nothing
            of this call is left in the engine.
    """
    if engine.in_flight:
        raise EngineError(
            f"generate() needs an engine with nothing in flight, and {engine.in_flight} samples "
            f"are: collect() or cancel() them first"
        )
    samples: list[Sample] = []
    stats = EngineStats()

    try:
        engine.submit(requests)
        step = 0
        while engine.in_flight:
            goes_on = may_begin is None or may_begin(step)
            if goes_on:
                engine.step()
            finished = engine.collect() if goes_on else engine.cancel()
            samples += finished.samples
            stats += finished.stats
            step += 1
    except BaseException:
        with suppress(Exception):  # the first error is the one to report
            engine.cancel()
        raise

    places = {request.id: place for place, request in enumerate(requests)}
    samples.sort(key=lambda sample: (places[sample.request_id], sample.sample_index))
    return Finished(samples, stats)
