"""What keeps vLLM from disturbing the process that it lives in, and the other way round.

vLLM is made to own its process. In ours it would, without a word or nearly so:

    RNG             reseed and consume the host's random numbers
    SeparateRandomness seeds           draw the same numbers in every replica
    request_seed process group   destroy the job's default process group when it is dropped
    keep_default_group shared memory   use the same segment names in every job on a machine
    name_shared_memory tied weights    keep an old packed copy of a tied output layer
    repack_output_layer prefix cache    answer with keys and values of older weights
    drop_prefix_cache

Besides, `HostState` puts back what vLLM changes in the process. Each guard has a test that shows
the damage without it. Written against vLLM 0.32; this file does not know what is generated.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mrlhf.errors import EngineError

_SEED_BITS = 62
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler reports log-probs by other rules
    "VLLM_NO_USAGE_STATS": "1",
}
_LOGGING = {"VLLM_CONFIGURE_LOGGING": "0"}  # its messages then pass through the host's logging
_OVERRIDES = "VLLM_CPU_KVCACHE_SPACE"  # would win over the size that is passed


class HostState:
    """The process's environment and thread setting, put back after vLLM has changed them."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Set what vLLM needs, and afterwards undo all that it and we have set, its own `VLLM_*`
        excepted.
        """
        before, set_num_threads = dict(os.environ), torch.set_num_threads
        os.environ.update({**_LOGGING, **before, **_SETTINGS})
        os.environ.pop(_OVERRIDES, None)
        if "VLLM_LOGGING_LEVEL" not in before:
            logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of what is meant to be so
        try:
            yield
        finally:
            for name in [
                name for name in os.environ if name not in before and not name.startswith("VLLM_")
            ]:
                del os.environ[name]
            os.environ.update(
                {k: v for k, v in before.items() if not k.startswith("VLLM_") or k == _OVERRIDES}
            )
            torch.set_num_threads = set_num_threads
            gc.unfreeze()  # vLLM exempts all objects alive, the host's among them, from collection


class SeparateRandomness:
    """Random states of the engine's own, exchanged for the host's while it runs.

    Unseeded draws of tensor-parallel ranks must agree, and the host's states differ between them.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._engine: tuple[Any, ...] | None = None
        self._seed = seed

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, the process's random numbers are the engine's."""
        host = self._read()
        if self._engine is None:
            self._start()
        else:
            self._write(self._engine)
        try:
            yield
        finally:
            self._engine = self._read()
            self._write(host)

    def _start(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        torch.manual_seed(self._seed)

    def _read(self) -> tuple[Any, ...]:
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device

    def _write(self, states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if states[3] is not None:
            torch.cuda.set_rng_state(states[3], self._device)


def request_seed(seed: int, uid: int, sample_index: int) -> int | None:
    """The seed of one sample's random numbers, whatever the replica and the other requests.

    vLLM draws from one generator a request; without a seed of its own it would draw from the
    process's.
    """
    digest = hashlib.blake2b(f"{seed}:{uid}:{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def keep_default_group() -> None:
    """Have a dropped engine destroy the process groups that it made, and no other."""
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    def destroy_own_groups() -> None:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            if parallel_state._WORLD is not None:
                parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        gc.collect()

    core.cleanup_dist_env_and_memory = destroy_own_groups


def job_name() -> str:
    """A name that this construction of engines shares with no other; every rank of the job calls
    it.
    """
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0)
    return names[0]


def name_shared_memory(job: str) -> None:
    """Put `job` into the names of the segments through which tensor-parallel ranks on a CPU
    exchange data.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    def make_group_name(communicator: Any) -> str:
        ranks = "-".join(str(rank) for rank in communicator.ranks)
        return f"mrlhf-{job}-{communicator.unique_name.replace('/', '_')}-{ranks}"

    cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def repack_output_layer(model: Any) -> None:
    """Pack a tied output layer again: on a CPU it has a packed copy of the embedding that it
    shares.
    """
    if model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def drop_prefix_cache(llm: Any) -> None:
    """Forget the keys and values of all prompts.

    Raises:
        EngineError: requests are still running.
    """
    if not llm.reset_prefix_cache():
        raise EngineError(
            "vLLM kept its prefix cache because requests are running; commit between calls of generate()"
        )
