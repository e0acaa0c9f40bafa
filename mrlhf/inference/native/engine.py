"""The native engine: generates with the weights where they lie, on any device that torch has.

A step of its loop is: schedule, run, draw, record. It does not know where weights come from, nor
what the samples are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import EngineError, WeightError
from mrlhf.inference.base import EngineLimits, EngineStats, Sample, SamplingParams
from mrlhf.inference.native import kernels
from mrlhf.inference.native.blocks import BlockManager
from mrlhf.inference.native.graphs import DecodeGraphs
from mrlhf.inference.native.kv_cache import KVCache, blocks_for
from mrlhf.inference.native.linear import compute_dtype
from mrlhf.inference.native.model import Decoder, make_operators
from mrlhf.inference.native.operators import PAGE, StepInputs
from mrlhf.inference.native.parameters import Parameters
from mrlhf.inference.native.sampler import Sampler
from mrlhf.inference.native.scheduler import Scheduler, Step
from mrlhf.inference.native.sequences import Sequences
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.inference.prompts import check_prompts
from mrlhf.inference.stopping import Decode
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Piece, Slot

# Two vectors of 8 numbers: small enough to share prefixes, large enough for the attention kernel.
_HOST_BLOCK = 16
_NOTHING = EngineStats(0, 0, 0, 0, 0, 0, 0)


class NativeEngine:
    """An `InferenceEngine` that shares parameters with training where their layouts coincide."""

    def __init__(
        self,
        spec: ModelSpec,
        tp_group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
        limits: EngineLimits,
        decode: Decode | None = None,
    ) -> None:
        """Describe the engine; memory is taken when weights come and when it generates.

        Args:
            spec: a language model.
            tp_group: the ranks of this replica in tensor-parallel order; None if this rank is the
                whole of it.
            device: where weights, cache and sampling are.
            dtype: of the parameters.
            limits: how much it may take at once.
            decode: text of token ids, for stop strings.

        Raises:
            WeightError: the model's heads, MLP or vocabulary do not divide over the group.
        """
        assert spec.head == "lm", f"an engine needs a language model, not head {spec.head!r}"
        self._spec, self._device, self._limits, self._decode = spec, device, limits, decode
        self._dtype = compute_dtype(dtype, device)
        self._block_size = limits.block_size or (PAGE if device.type == "cuda" else _HOST_BLOCK)
        self._parallel = TensorParallel(tp_group)
        self._groups = max(1, spec.num_kv_heads // self._parallel.size)
        rows = -(-spec.vocab_size // self._parallel.size)
        if (self._parallel.size - 1) * rows >= spec.vocab_size:
            raise WeightError(
                f"a vocabulary of {spec.vocab_size} in parts of {rows} leaves nothing to the last of "
                f"{self._parallel.size} ranks; use a smaller rollout.tp"
            )
        self._parameters = Parameters(spec, self._parallel.rank, self._parallel.size, device, dtype)
        self._operators = make_operators(spec, self._dtype, device, limits.max_length)
        self._sampler = Sampler(
            self._parallel, kernels.load(self._dtype) if device.type == "cpu" else None
        )
        self._version: int | None = None
        self._awake = True
        self._decoder: Decoder | None = None
        self._cache: KVCache | None = None
        self._manager: BlockManager | None = None
        self._graphs: DecodeGraphs | None = None
        self._stats = _NOTHING

    @property
    def version(self) -> int:
        """The version of the weights, as last committed.

        Raises:
            EngineError: none was.
        """
        if self._version is None:
            raise EngineError(
                "the engine has no weights yet: fill weight_slots() or bind(), then commit(version)"
            )
        return self._version

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache now."""
        return 0 if self._cache is None else self._cache.nbytes

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Which named slices each parameter of this rank holds; costs no memory."""
        return dict(self._parameters.pieces)

    def weight_slots(self) -> list[Slot]:
        """Where each named slice is stored, to be filled in place; storage is made for what is not
        bound.
        """
        return self._parameters.slots()

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Make `tensor` itself the engine's parameter; nothing is copied.

        Raises:
            EngineError: there is no such parameter, or shape, dtype or device differ.
        """
        self._parameters.bind(parameter, tensor)

    @torch.inference_mode()
    def commit(self, version: int) -> None:
        """The weights are complete and are `version`: lay them out, and forget prompts computed
        with older ones.

        Raises:
            EngineError: a parameter has no storage.
        """
        if missing := self._parameters.missing:
            raise EngineError(
                f"{len(missing)} parameters, {missing[0]} first, are neither bound nor in weight_slots()"
            )
        self._decoder = Decoder(
            self._spec, self._parameters, self._parallel, self._operators, self._dtype
        )
        self._manager = self._graphs = None
        self._version = version

    def sleep(self) -> None:
        """Free the KV cache and the copies of weights laid out for this machine; the weights stay."""
        self._decoder = self._cache = self._manager = self._graphs = None
        self._awake = False

    def wake(self) -> None:
        """Allow `commit` and `generate` again."""
        self._awake = True

    def take_cache(self) -> None:
        """Take the memory of the KV cache, unless there is one; `generate` does so otherwise.

        Raises:
            EngineError: there is not enough.
        """
        if self._cache is None:
            spec, size = self._spec, self._block_size
            spare = int(self._device.type == "cuda")
            blocks = blocks_for(self._limits, size, self._block_bytes, self._device, spare)
            shape = (spec.num_layers, blocks, size, self._groups, spec.head_dim)
            self._cache = KVCache(*shape, self._dtype, self._device)

    def stats(self) -> EngineStats:
        """What the last call of `generate` did."""
        return self._stats

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        uids: Sequence[int],
        sampling: SamplingParams,
        samples: Sequence[range] | None = None,
    ) -> list[Sample]:
        """Answer token-id `prompts`; the result is ordered by prompt, then by sample.

        Args:
            prompts: token ids, at least one a prompt.
            uids: a number for each prompt, on which its random numbers depend; equal numbers, equal
                draws.
            sampling: how to draw.
            samples: which sample indices of each prompt to draw; `range(sampling.n)` of each where
                None.

        Raises:
            EngineError: a prompt is empty, too long or not of this vocabulary, the engine sleeps or
                has no weights, there is no memory for the cache, or the model's logits are not
                finite.
        """
        samples = [range(sampling.n)] * len(prompts) if samples is None else samples
        decoder = self._check(prompts, uids, samples, sampling)
        if not any(samples):
            self._stats = _NOTHING
            return []
        cache, manager = self._ready_cache(decoder)
        counts = [len(indices) for indices in samples]
        limits = self._limits
        scheduler = Scheduler(
            prompts, counts, sampling.max_tokens, manager, self._block_size, limits.max_num_seqs,
            limits.max_prefill_tokens,
        )  # fmt: skip
        sequences = Sequences(prompts, uids, samples, sampling, self._decode)
        steps = 0
        try:
            while not scheduler.done:
                step = scheduler.schedule()
                logits = self._run(decoder, cache, self._inputs(step, scheduler, sequences))
                cache.copy(step.copies)
                if len(step.draws):
                    scheduler.record(
                        step.draws, self._draw(logits, step, decoder, sequences, sampling)
                    )
                steps += 1
        except BaseException:
            # What sequences hold of the cache is lost with them, and it may hold numbers that are
            # not finite.
            self._cache = self._manager = self._graphs = None
            raise
        results = sequences.samples()
        self._stats = EngineStats(
            steps=steps,
            prompt_tokens=int(scheduler.prompt_lengths.sum()),
            computed_prompt_tokens=scheduler.computed_prompt_tokens,
            generated_tokens=sum(len(sample.token_ids) for sample in results),
            preemptions=scheduler.preemptions,
            cache_bytes=cache.nbytes,
            peak_cache_bytes=scheduler.peak_blocks * self._block_bytes,
        )
        return results

    def _inputs(self, step: Step, scheduler: Scheduler, sequences: Sequences) -> StepInputs:
        """The tensors of a pass; on a GPU they are sent from pinned memory, so nothing waits."""
        ends = np.cumsum(step.counts)
        query_starts = np.concatenate([[0], ends]).astype(np.int32)
        place = np.repeat(np.arange(len(step.rows)), step.counts)
        positions = np.arange(ends[-1]) - query_starts[place] + step.starts[place]
        rows = step.rows[place]
        lengths = step.starts + step.counts
        longest = int(lengths.max())
        block_tables = scheduler.block_tables[step.rows, : -(-longest // self._block_size)]
        slots = block_tables[place, positions // self._block_size] * np.int64(self._block_size)
        return StepInputs(
            tokens=self._send(sequences.tokens_at(rows, positions)),
            positions=self._send(positions),
            slots=self._send(slots + positions % self._block_size),
            query_starts=self._send(query_starts),
            lengths=self._send(lengths.astype(np.int32)),
            block_tables=self._send(np.ascontiguousarray(block_tables)),
            last=self._send(ends[step.complete] - 1),
            most_queries=int(step.counts.max()),
            longest=longest,
        )

    def _run(self, decoder: Decoder, cache: KVCache, inputs: StepInputs) -> Tensor:
        if (
            self._graphs is not None
            and inputs.most_queries == 1
            and len(inputs.last) == len(inputs.tokens)
        ):
            return self._graphs.run(inputs)
        return decoder.forward(inputs, cache.layers)

    def _draw(
        self,
        logits: Tensor,
        step: Step,
        decoder: Decoder,
        sequences: Sequences,
        sampling: SamplingParams,
    ) -> list[int]:
        """Draw and record the next token of each of `step.draws`; those that ended."""
        if len(step.draws) > len(logits):
            logits = logits[self._send(step.sources)]
        uniform = self._send(sequences.uniforms(step.draws))
        tokens, logprobs = self._sampler.draw(logits, decoder.vocab_start, uniform, sampling)
        return sequences.record(step.draws, tokens.cpu().numpy(), logprobs.cpu().numpy())

    def _ready_cache(self, decoder: Decoder) -> tuple[KVCache, BlockManager]:
        self.take_cache()
        assert self._cache is not None
        if self._manager is None:
            layers = self._cache.layers
            captures = self._device.type == "cuda" and not self._limits.enforce_eager
            # Padding of captured steps writes to a block of its own.
            blocks = self._parallel.least(self._cache.blocks) - captures
            self._manager = BlockManager(blocks, self._block_size)
            if captures:
                self._graphs = DecodeGraphs(
                    lambda inputs: decoder.forward(inputs, layers), self._limits.max_num_seqs,
                    -(-self._limits.max_length // self._block_size), blocks, self._block_size,
                )  # fmt: skip
        return self._cache, self._manager

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        uids: Sequence[int],
        samples: Sequence[range],
        sampling: SamplingParams,
    ) -> Decoder:
        assert len(prompts) == len(uids) == len(samples), (len(prompts), len(uids), len(samples))
        _ = self.version  # raises where there are no weights
        if not self._awake or self._decoder is None:
            raise EngineError("the engine sleeps: call wake() and commit() before generate()")
        check_prompts(prompts, sampling.max_tokens, self._limits.max_length, self._spec.vocab_size)
        return self._decoder

    @property
    def _block_bytes(self) -> int:
        tokens = self._spec.num_layers * self._block_size
        return 2 * tokens * self._groups * self._spec.head_dim * self._dtype.itemsize

    def _send(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return (
            tensor
            if self._device.type == "cpu"
            else tensor.pin_memory().to(self._device, non_blocking=True)
        )
