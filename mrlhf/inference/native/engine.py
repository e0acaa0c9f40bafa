"""The native engine: generates with the weights where they lie, on any device that torch has.

A step of its loop is: schedule, run, sample, record. It does not know where weights come from, nor what the samples are
for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import EngineError
from mrlhf.inference.base import Sample, SamplingParams
from mrlhf.inference.native import sampler
from mrlhf.inference.native.kv_cache import KVCache
from mrlhf.inference.native.model import Decoder, Weights
from mrlhf.inference.native.parameters import Parameters
from mrlhf.inference.native.scheduler import Admission, Move, Scheduler
from mrlhf.inference.native.sequences import Sequences
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Piece, Slot


class NativeEngine:
    """An `InferenceEngine` that shares parameters with training where their layouts coincide."""

    def __init__(
        self,
        spec: ModelSpec,
        tp_group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_length: int,
        max_prefill_tokens: int,
    ) -> None:
        """Describe the engine; memory is taken when weights come and when it generates.

        Args:
            spec: a language model.
            tp_group: the ranks of this replica in tensor-parallel order; None if this rank is the whole of it.
            device: where weights, cache and sampling are.
            dtype: of parameters and cache.
            max_num_seqs: sequences that are decoded at once.
            max_length: longest prompt and response together, tokens.
            max_prefill_tokens: largest batch of prompts computed at once, padding included; a longer prompt goes alone.

        Raises:
            WeightError: the model's heads or MLP do not divide over the group.
        """
        assert spec.head == "lm", f"an engine needs a language model, not head {spec.head!r}"
        self._spec, self._device, self._dtype = spec, device, dtype
        self._max_num_seqs, self._max_length = max_num_seqs, max_length
        self._max_prefill_tokens = max_prefill_tokens
        self._parallel = TensorParallel(tp_group)
        self._parameters = Parameters(spec, self._parallel.rank, self._parallel.size, device, dtype)
        self._decoder = Decoder(spec, self._parallel, device, dtype, max_length)
        self._cache = self._empty_cache()
        self._version: int | None = None
        self._awake = True

    @property
    def version(self) -> int:
        """The version of the weights, as last committed.

        Raises:
            EngineError: none was.
        """
        if self._version is None:
            raise EngineError("the engine has no weights yet: fill weight_slots() or bind(), then commit(version)")
        return self._version

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache now."""
        return self._cache.nbytes

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Which named slices each parameter of this rank holds; costs no memory."""
        return dict(self._parameters.pieces)

    def weight_slots(self) -> list[Slot]:
        """Where each named slice is stored, to be filled in place; storage is made for what is not bound."""
        return self._parameters.slots()

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Make `tensor` itself the engine's parameter; nothing is copied.

        Raises:
            EngineError: there is no such parameter, or shape, dtype or device differ.
        """
        self._parameters.bind(parameter, tensor)

    def commit(self, version: int) -> None:
        """The weights are complete and are `version`; keys and values of older ones never outlive their call.

        Raises:
            EngineError: a parameter has no storage.
        """
        if missing := self._parameters.missing:
            raise EngineError(f"{len(missing)} parameters, {missing[0]} first, are neither bound nor in weight_slots()")
        self._version = version

    def sleep(self) -> None:
        """Free the KV cache; weights stay."""
        self._cache, self._awake = self._empty_cache(), False

    def wake(self) -> None:
        """Allow `generate` again; the cache grows when it is needed."""
        self._awake = True

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], uids: Sequence[int], sampling: SamplingParams) -> list[Sample]:
        """Answer token-id `prompts`; the result is ordered by prompt, then by sample.

        Args:
            prompts: token ids, at least one a prompt.
            uids: a number for each prompt, on which its random numbers depend; equal numbers, equal draws.
            sampling: how to draw.

        Raises:
            EngineError: a prompt is empty, too long or not of this vocabulary, the engine sleeps or has no weights, or
                the model's logits are not finite.
        """
        self._check(prompts, uids, sampling)
        if not prompts:
            return []
        lengths = [len(prompt) for prompt in prompts]
        weights = Weights.of(self._parameters, self._spec)
        scheduler = Scheduler(lengths, sampling.n, self._max_num_seqs, self._max_prefill_tokens)
        sequences = Sequences(lengths, uids, sampling, scheduler.slots, self._device)
        while not scheduler.done:
            while admitted := scheduler.admit():
                slots, logits = self._prefill(admitted, prompts, weights, scheduler, sequences)
                scheduler.finish(self._draw(logits, slots, sequences, sampling))
            self._move(scheduler.compact(), sequences)
            if batch := scheduler.active:
                slots, logits = self._decode(batch, weights, scheduler, sequences)
                scheduler.finish(self._draw(logits, slots, sequences, sampling))
        return sequences.samples()

    def _prefill(
        self,
        admitted: list[Admission],
        prompts: Sequence[Sequence[int]],
        weights: Weights,
        scheduler: Scheduler,
        sequences: Sequences,
    ) -> tuple[Tensor, Tensor | None]:
        """Slots [started] and logits [started, vocab] of samples that enter; each prompt is computed once."""
        batch = [prompts[admission.prompt] for admission in admitted]
        longest = max(len(prompt) for prompt in batch)
        tokens = self._ints([[*prompt, *[0] * (longest - len(prompt))] for prompt in batch])
        slots = self._ints([slot for admission in admitted for slot in admission.slots])
        sources = self._ints([i for i, admission in enumerate(admitted) for _ in admission.slots])
        sequences.start(self._ints([row for admission in admitted for row in admission.rows]), slots)
        self._cache.reserve(scheduler.slots, longest)
        lengths = self._ints([len(prompt) for prompt in batch])
        logits = self._decoder.prefill(weights, tokens, lengths, self._cache, sources, slots)
        return slots, None if logits is None else logits[sources]

    def _decode(
        self, batch: int, weights: Weights, scheduler: Scheduler, sequences: Sequences
    ) -> tuple[Tensor, Tensor | None]:
        """Slots [batch] and logits [batch, vocab] of the samples that run."""
        tokens, positions = sequences.next_tokens(batch)
        length = int(positions.max()) + 1
        self._cache.reserve(scheduler.slots, length)
        logits = self._decoder.decode(weights, tokens, positions, length, self._cache)
        return torch.arange(batch, device=self._device), logits

    def _draw(self, logits: Tensor | None, slots: Tensor, sequences: Sequences, sampling: SamplingParams) -> list[int]:
        """Draw and record the next token in each of `slots`; those that ended. Rank 0 of the group draws for all."""
        if logits is None:
            tokens, logprobs = torch.zeros_like(slots), torch.zeros_like(slots, dtype=torch.float32)
        else:
            tokens, logprobs = sampler.sample(logits, sequences.uniforms(slots), sampling)
        return sequences.record(slots, *self._parallel.from_first(tokens, logprobs))

    def _move(self, moves: list[Move], sequences: Sequences) -> None:
        if moves:
            sources, targets = (self._ints(slots) for slots in zip(*((m.source, m.target) for m in moves), strict=True))
            self._cache.move(sources, targets)
            sequences.move(sources, targets)

    def _check(self, prompts: Sequence[Sequence[int]], uids: Sequence[int], sampling: SamplingParams) -> None:
        assert len(prompts) == len(uids), f"{len(prompts)} prompts, {len(uids)} uids"
        _ = self.version  # raises where there are no weights
        if not self._awake:
            raise EngineError("the engine sleeps: call wake() before generate()")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise EngineError(f"prompt {number} is empty: give every prompt at least one token")
            if len(prompt) + sampling.max_tokens > self._max_length:
                raise EngineError(
                    f"prompt {number}: {len(prompt)} tokens + max_tokens {sampling.max_tokens} exceed the engine's "
                    f"max_length {self._max_length}; shorten the prompt or raise data.max_prompt_length"
                )
            if not 0 <= min(prompt) <= max(prompt) < self._spec.vocab_size:
                raise EngineError(
                    f"prompt {number} has token ids from {min(prompt)} to {max(prompt)}, the model's vocabulary is "
                    f"{self._spec.vocab_size}; use the tokenizer that belongs to the model"
                )

    def _empty_cache(self) -> KVCache:
        kv_heads = self._spec.num_kv_heads // self._parallel.size
        return KVCache(self._spec.num_layers, kv_heads, self._spec.head_dim, self._device, self._dtype)

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
