"""vLLM as an inference engine inside the training ranks: an optional backend.

It is chosen by `rollout.engine: vllm`. A replica is made of consecutive ranks of the job. Each rank
runs vLLM's engine in its own process, and all ranks of a replica run the same requests. This file
does not know where weights come from, or what the samples are for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import ConfigError, EngineError
from mrlhf.inference.base import EngineLimits, Finished, HeldBytes, Request
from mrlhf.inference.checks import VLLM, committed, require_engine
from mrlhf.inference.in_flight import InFlight
from mrlhf.inference.sizes import CacheShape, block_tokens, gpu_room
from mrlhf.inference.stopping import Decode
from mrlhf.inference.vllm import guards
from mrlhf.inference.vllm.draws import Draws
from mrlhf.inference.vllm.parameters import VllmParameters
from mrlhf.inference.vllm.pieces import parameter_pieces, parameter_shapes, unsupported_on_cpu
from mrlhf.inference.vllm.requests import Requests
from mrlhf.models.families import family_of, save_config
from mrlhf.models.spec import ModelSpec
from mrlhf.printable import size_text
from mrlhf.weights.shard import Piece, Slot


class VllmEngine:
    """An `InferenceEngine` run by vLLM."""

    def __init__(
        self,
        spec: ModelSpec,
        tp_group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        limits: EngineLimits,
        decode: Decode | None = None,
        never: Sequence[int] = (),
    ) -> None:
        """Build the engine with placeholder weights, and take its memory; all ranks call this.

        Args:
            tp_group: the ranks of this replica: consecutive ranks of the job, the first of which is
                a multiple of their number.
            limits: how much the engine may take; on a CPU a block has a multiple of 32 tokens.
            decode: token ids to text; needed for stop strings.
            never: token ids that are never drawn.

        Raises:
            ConfigError: vLLM is not installed, or cannot run this model or layout.
            WeightError: the model's heads, MLP or vocabulary do not divide over the group.
            EngineError: vLLM does not arrange the model as expected.
        """
        assert spec.head == "lm", f"an engine needs a language model, not head {spec.head!r}"
        require_engine("vllm")
        tp_size = _replica_size(tp_group)
        check_support(spec, tp_size, device)
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._limits = limits
        self._version: int | None = None
        self._has_weights = False
        self._awake = True

        block = block_tokens("vllm", device.type, limits.block_size)
        self._cache_shape = CacheShape.on_rank(spec, tp_size, dtype.itemsize, block)
        self._cache_bytes = self._choose_cache_bytes()

        self._llm = self._build(tp_size)

        pieces = parameter_pieces(spec, dist.get_rank(tp_group), tp_size)
        shapes = parameter_shapes(spec, tp_size)
        runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._parameters = VllmParameters(runner.model, pieces, shapes, device, dtype)
        runner.sampler = Draws(runner.requests, runner.input_batch, never)
        blocks = self._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks  # on a CPU too
        self._all = HeldBytes(self._parameters.nbytes, blocks * self._cache_shape.block_bytes)
        self._in_flight = InFlight(limits, spec.vocab_size, decode)
        self._requests = Requests(
            self._llm.llm_engine,
            runner.sampler,
            blocks,
            self._cache_shape.block_bytes,
            self._in_flight,
            decode,
        )

    @property
    def version(self) -> int:
        """The version of the weights that was last committed; EngineError if none was."""
        return committed(self._version)

    @property
    def held_bytes(self) -> HeldBytes:
        """See `InferenceEngine`; bound weights have copies here, and a CPU's engine frees none."""
        frees = self._device.type == "cuda" and not self._awake
        return HeldBytes(0, 0) if frees else self._all

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """See `InferenceEngine`."""
        return self._parameters.pieces

    def weight_slots(self) -> list[Slot]:
        """Return where to write each named slice; on a CPU this is new after each `commit`."""
        return self._parameters.slots()

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Take `parameter` from `tensor`, which stays as it is; EngineError if it does not fit."""
        self._parameters.bind(parameter, tensor)

    def keeps(self, tensor: str) -> bool:
        """See `InferenceEngine`; packing the weights changes where they are."""
        return False

    def commit(self, version: int) -> None:
        """Declare the weights complete as `version`: pack them, and drop the prefix cache.

        Raises:
            EngineError: a parameter is neither bound nor in `weight_slots` since the last commit,
                or samples are in flight.
        """
        self._in_flight.require_none("commit")
        self._parameters.install()
        if self._device.type == "cuda" and not self._awake:
            # Only now are the buffers of the transfer gone.
            self._llm.wake_up(tags=["kv_cache"])
        guards.drop_prefix_cache(self._llm)
        self._version = version
        self._has_weights = True
        self._awake = True

    @property
    def in_flight(self) -> int:
        """See `InferenceEngine`."""
        return len(self._in_flight)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, also while others are in flight; EngineError as `InFlight.check`."""
        version = self.version  # raises where there are no weights
        if not (self._awake and self._has_weights):
            raise EngineError(
                "the engine sleeps: call wake(), bring weights and commit() before submit()"
            )
        with torch.inference_mode():
            self._requests.submit(requests, version)

    def step(self) -> None:
        """Run one pass, as `InferenceEngine` says; EngineError if logits are not finite."""
        with torch.inference_mode():
            self._requests.step()

    def collect(self) -> Finished:
        """See `InferenceEngine`."""
        return self._requests.collect()

    def cancel(self) -> Finished:
        """See `InferenceEngine`."""
        return self._requests.cancel()

    def sleep(self, free_weights: bool = False) -> None:
        """Free a GPU's cache and weights, so that new weights must come; on a CPU nothing is freed.

        Raises:
            EngineError: samples are in flight.
        """
        self._in_flight.require_none("sleep")
        if self._device.type == "cuda" and self._awake:
            self._llm.sleep(level=2)
            self._has_weights = False
        self._awake = False

    def wake(self) -> None:
        """Undo `sleep`, so that weights can arrive; `commit` takes a GPU's cache again."""
        if self._device.type == "cuda":
            if not self._awake:
                self._llm.wake_up(tags=["weights"])
        else:
            self._awake = True

    def take_cache(self) -> None:
        """Do nothing: a CPU's cache is there from the start, and `commit` takes a GPU's back."""

    def _build(self, tp_size: int) -> Any:
        """Construct vLLM from a directory that holds the model's `config.json` and nothing else."""
        job = guards.job_name()
        with (
            tempfile.TemporaryDirectory() as directory,
            guards.HostState().kept(),
            guards.randomness_kept(self._device),
        ):
            from vllm import LLM

            guards.name_shared_memory(job)
            guards.keep_default_group()
            save_config(self._spec, directory, self._dtype)
            llm = LLM(
                model=directory,
                hf_overrides={"architectures": [family_of(self._spec).class_name("lm")]},
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=str(self._dtype).removeprefix("torch."),
                tensor_parallel_size=tp_size,
                distributed_executor_backend="external_launcher",
                enable_sleep_mode=self._device.type == "cuda",
                **self._size_arguments(),
            )
            guards.remove_memory_names(job)
            return llm

    def _size_arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments about sizes, and those that depend on them."""
        limits = self._limits
        on_cpu = self._device.type == "cpu"
        return {
            "max_model_len": limits.max_length,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": max(limits.max_prefill_tokens, limits.max_num_seqs),
            "block_size": self._cache_shape.block_size,
            "kv_cache_memory_bytes": self._cache_bytes,
            "gpu_memory_utilization": self._share_of_memory(),
            # One pool of blocks for all layers: blocks of tokens outside of windows are kept too.
            "disable_hybrid_kv_cache_manager": True,
            # Compiling on a CPU takes tens of seconds and gains a few per cent.
            "enforce_eager": limits.enforce_eager or on_cpu,
            # Other kernels of a GPU would keep the weights of experts in an order of their own.
            "moe_backend": "auto" if on_cpu else "triton",
        }

    def _share_of_memory(self) -> float:
        """Return vLLM's `gpu_memory_utilization`: ours, or what training leaves if that is less."""
        utilization = self._limits.gpu_memory_utilization
        if self._device.type == "cpu":
            return utilization
        if self._limits.cache_bytes is not None:
            # vLLM requires this share to be free, and then takes the bytes that it is given.
            return 0.01

        free, total = torch.cuda.mem_get_info(self._device)
        share = gpu_room(utilization, 0, free, total) / total
        if share <= 0:
            raise ConfigError(
                f"rollout.gpu_memory_utilization {utilization} leaves vLLM nothing: "
                f"{size_text(total - free)} of {size_text(total)} are in use; make the models' "
                "share smaller, or raise it above 0.9"
            )
        return share

    def _choose_cache_bytes(self) -> int | None:
        """Return the size of the KV cache; None lets vLLM choose it."""
        limits = self._limits
        shape = self._cache_shape
        # One sequence of full length, and the block that vLLM leaves unused.
        least = (-(-limits.max_length // shape.block_size) + 1) * shape.block_bytes
        if limits.cache_bytes is not None:
            if limits.cache_bytes < least:
                raise ConfigError(
                    f"a KV cache of {size_text(limits.cache_bytes)} is less than the "
                    f"{size_text(least)} that one sequence of {limits.max_length} tokens needs in "
                    f"vLLM; raise rollout.kv_cache_mb"
                )
            return limits.cache_bytes
        if self._device.type == "cuda":
            return None

        # What all sequences need, up to half of this rank's part of the free memory.
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = free // (2 * dist.get_world_size())
        return max(least, min(limits.max_num_seqs * least, share))


def _replica_size(tp_group: dist.ProcessGroup) -> int:
    """Return the number of ranks of a replica; ConfigError if vLLM would not group these ranks."""
    ranks = dist.get_process_group_ranks(tp_group)
    size = len(ranks)
    if ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size:
        raise ConfigError(
            f"vLLM needs replicas of consecutive ranks, not {ranks}; use rollout.engine=native"
        )
    return size


def check_support(spec: ModelSpec, tp: int, device: torch.device) -> None:
    """Raise a ConfigError if vLLM cannot run this model here; WeightError if `tp` does not fit."""
    parameter_pieces(spec, 0, tp)
    with guards.HostState().kept():  # importing vLLM alters the process, too
        _check_platform(spec, tp, device)


def _check_platform(spec: ModelSpec, tp: int, device: torch.device) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (device.type == "cpu"):
        raise ConfigError(
            f"the installed vLLM is for {current_platform.device_type} and the run is on "
            f"{device.type}; install the other build (make vllm for a CPU, pip install "
            f"'vllm=={VLLM}.*' for CUDA) or set rollout.engine=native"
        )
    if device.type == "cpu":
        feature = unsupported_on_cpu(spec, tp)
        if feature is not None:
            raise ConfigError(
                f"vLLM is not supported for a model with {feature}; set rollout.engine=native"
            )
