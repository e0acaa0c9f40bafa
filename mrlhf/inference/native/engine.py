"""The native engine: it generates on any device that torch has, without a copy of the weights.

This file takes weights, answers requests and frees memory; `batch` decodes the samples. It does not
know where weights come from, or what the samples are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import EngineError, WeightError
from mrlhf.gpu.library import try_kernels
from mrlhf.inference.base import EngineLimits, EngineStats, Finished, HeldBytes, Request
from mrlhf.inference.checks import check_complete, committed
from mrlhf.inference.in_flight import InFlight
from mrlhf.inference.native.batch import Batch
from mrlhf.inference.native.graphs import DecodeGraphs
from mrlhf.inference.native.kv_cache import KVCache, blocks_for
from mrlhf.inference.native.model import Decoder, tables_of_layers
from mrlhf.inference.native.parameters import Parameters
from mrlhf.inference.native.runner import Runner
from mrlhf.inference.native.sampler import TokenSampler
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.inference.sizes import CacheShape, block_tokens, compute_dtype, engine_tp_problem
from mrlhf.inference.stopping import Decode
from mrlhf.models.lora import is_adapter
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import ReplicaPlace
from mrlhf.weights.shard import Piece, Slot


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
        never: Sequence[int] = (),
        ep: int = 1,
    ) -> None:
        """Describe the engine; memory is taken when weights come and when requests come.

        Args:
            tp_group: the ranks of this replica in tensor-parallel order; None if this rank is the
                whole replica.
            decode: token ids to text; needed for stop strings.
            never: token ids that are never drawn.
            ep: the number of parts of the group over which the experts of a layer are shared out.

        Raises:
            WeightError: the model's heads, MLP, experts or vocabulary do not divide over the group.
        """
        assert spec.head == "lm", f"an engine needs a language model, not head {spec.head!r}"
        self._spec = spec
        self._device = device
        self._limits = limits
        self._decode = decode
        self._dtype = compute_dtype(dtype, device)

        self._parallel = TensorParallel(tp_group)
        problem = engine_tp_problem("native", self._parallel.size, spec, ep=ep)
        if problem is not None:
            raise WeightError(problem)
        self._cache_shape = CacheShape.on_rank(
            spec,
            self._parallel.size,
            self._dtype.itemsize,
            block_tokens("native", device.type, limits.block_size),
            # All ranks choose the same experts.
            spec.experts if self._parallel.rank == 0 else None,
        )
        place = ReplicaPlace(self._parallel.rank, self._parallel.size, ep)
        self._parameters = Parameters(spec, place, device, dtype)
        self._tables = tables_of_layers(spec, device, limits.max_length)
        self._sampler = TokenSampler(self._parallel, never)
        if device.type == "cuda":
            page = self._cache_shape.block_size
            for sizes in spec.kernel_sizes(self._dtype, page, self._parallel.size):
                try_kernels(sizes)
        captures = device.type == "cuda" and not limits.enforce_eager
        block_size = self._cache_shape.block_size
        self._graphs = DecodeGraphs(limits, block_size, device) if captures else None
        self._is_warm = device.type == "cpu"  # a GPU's kernels are compiled when they first run

        # These are None while the engine does not have them: the weights laid out for this machine,
        # the cache, the runner that uses both, and the samples that are being decoded.
        self._version: int | None = None
        self._awake = True
        self._decoder: Decoder | None = None
        self._cache: KVCache | None = None
        self._runner: Runner | None = None
        self._blocks = 0  # of the last cache
        self._batch: Batch | None = None
        self._in_flight = InFlight(limits, spec.vocab_size, decode)

    @property
    def version(self) -> int:
        """The version of the weights that was last committed; EngineError if none was."""
        return committed(self._version)

    @property
    def cache_bytes(self) -> int:
        """The present size of the KV cache, in bytes."""
        return 0 if self._cache is None else self._cache.nbytes

    @property
    def held_bytes(self) -> HeldBytes:
        """See `InferenceEngine`; copies that are laid out for a host's products do not count."""
        return HeldBytes(self._parameters.stored_bytes, self.cache_bytes)

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """See `InferenceEngine`."""
        return dict(self._parameters.pieces)

    def weight_slots(self) -> list[Slot]:
        """See `InferenceEngine`."""
        return self._parameters.slots()

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Make `tensor` itself the parameter; EngineError if there is none that it fits."""
        self._parameters.bind(parameter, tensor)

    def keeps(self, tensor: str) -> bool:
        """Whether the weight is kept for all versions, asleep too: it is the base of adapters."""
        return self._spec.lora is not None and not is_adapter(tensor)

    @torch.inference_mode()
    def commit(self, version: int) -> None:
        """Declare the weights complete: lay them out for this machine, and forget computed prompts.

        Raises:
            EngineError: a parameter has no storage, or samples are in flight.
        """
        self._in_flight.require_none("commit")
        check_complete(self._parameters.missing)
        self._decoder = Decoder(
            self._spec, self._parameters, self._parallel, self._tables, self._dtype
        )
        self._runner = None
        self._version = version

    @property
    def in_flight(self) -> int:
        """See `InferenceEngine`."""
        return len(self._in_flight)

    @torch.inference_mode()
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, also while others are in flight.

        Raises:
            EngineError: `InFlight.check` refuses a request; the engine sleeps or has no weights;
                there is no memory for the cache. Then none is queued.
        """
        version = self.version  # raises where there are no weights
        if not self._awake or self._decoder is None:
            raise EngineError("the engine sleeps: call wake() and commit() before submit()")
        self._in_flight.check(requests)
        if not any(request.samples for request in requests):
            return

        batch = self._batch
        if batch is None:
            runner = self._ready_runner(self._decoder)
            sampling = requests[0].sampling
            batch = Batch(runner, sampling, self._limits, self._decode, version)

        # If the batch cannot take the requests, they are not in flight.
        batch.add(requests)
        self._batch = batch
        self._in_flight.add(requests)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one pass through the model, as `InferenceEngine` says.

        Raises:
            EngineError: the model's logits are not finite.
        """
        if self._batch is None:
            return
        try:
            self._in_flight.finish(self._batch.step())
        except BaseException:
            # The cache may hold numbers that are not finite, or prompts that were not computed.
            self._in_flight.clear()
            self._batch = None
            self._runner = None
            self._cache = None
            raise

    def collect(self) -> Finished:
        """See `InferenceEngine`."""
        finished = self._in_flight.collect()
        if self._batch is None or self._cache is None:
            return finished
        counts = self._batch.take_counts()
        if not len(self._in_flight):
            self._batch = None

        stats = EngineStats(
            steps=counts.steps,
            computed_prompt_tokens=counts.computed_prompt_tokens,
            preemptions=counts.preemptions,
            cache_bytes=self._cache.nbytes,
            peak_cache_bytes=counts.peak_blocks * self._cache_shape.block_bytes
            + self._cache.state_bytes,
        )
        return Finished(finished.samples, finished.stats + stats)

    def drawn_so_far(self) -> list[list[int]]:
        """The tokens of each sample in flight, to be shown."""
        return [] if self._batch is None else self._batch.drawn_so_far()

    def cancel(self) -> Finished:
        """See `InferenceEngine`."""
        if self._batch is not None:
            self._in_flight.finish(self._batch.drop_all())
        self._in_flight.drop_unfinished()
        return self.collect()

    def sleep(self, free_weights: bool = False) -> None:
        """Free the KV cache and the copies of weights laid out here; see `InferenceEngine`.

        Copies of the base of adapters stay, as the base does.
        """
        self._in_flight.require_none("sleep")
        self._decoder = None
        self._runner = None
        self._cache = None
        self._awake = False
        if free_weights:
            self._parameters.free(self.keeps)

    def wake(self) -> None:
        """Allow `commit` and `submit` again."""
        self._awake = True

    def take_cache(self) -> None:
        """Take the memory of the KV cache unless it was taken; otherwise `submit` takes it.

        Raises:
            EngineError: there is not enough memory.
        """
        # A GPU's `commit` copies experts that lie apart; the cache gets the memory that is left.
        stacks_experts = self._device.type == "cuda" and self._spec.experts is not None
        if self._cache is not None or (stacks_experts and self._decoder is None):
            return

        spare = int(self._device.type == "cuda")
        shape = self._cache_shape
        sizes = (shape.block_size, shape.block_bytes)
        nbytes = self._parameters.nbytes
        slots = self._limits.max_num_seqs + spare
        states = slots * shape.state_bytes
        blocks = blocks_for(self._limits, *sizes, self._device, spare, nbytes, states)
        if self._graphs is not None and self._blocks <= blocks < 1.1 * self._blocks:
            blocks = self._blocks  # graphs may be kept for a cache of the same size
        self._blocks = blocks
        self._cache = KVCache(shape, blocks, self._dtype, self._device, slots)

    def _ready_runner(self, decoder: Decoder) -> Runner:
        """Return the runner of these weights; all ranks make it together."""
        if self._runner is None:
            self.take_cache()
            assert self._cache is not None
            weights = [*(slot.parameter for slot in self.weight_slots()), *decoder.stacks]
            self._runner = Runner(
                decoder, self._cache, self._parallel, self._sampler, self._graphs, weights
            )
            if not self._is_warm:
                self._runner.warm_up()
                self._is_warm = True
        return self._runner
