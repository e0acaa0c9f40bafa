"""Keeps vLLM from disturbing the process that it lives in, and the process from disturbing vLLM.

vLLM is made to own its process. In ours it would do damage, with little or no warning. Each guard
here prevents one kind:

    randomness_kept         vLLM reseeds the host's random numbers
    keep_default_group      a dropped engine destroys the job's default process group
    name_shared_memory      all jobs on a machine use the same names of shared memory
    remove_memory_names     a process that ends without destructors leaves its shared memory behind
    repack_output_layer     a tied output layer keeps an old packed copy of its weights
    pack_experts            new weights of experts are taken for packed ones
    drop_prefix_cache       prompts are answered with keys and values of older weights

Besides, `HostState` puts back what vLLM changes in the process. Each guard has a test that shows
the damage without it. The guards are written for vLLM 0.32; what they touch is the same in 0.33.
They do not know what is generated.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mrlhf.errors import EngineError
from mrlhf.parallel.collectives import from_first

_SHARED_MEMORY = Path("/dev/shm")
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `Draws` stands in for the sampler of the first
    "VLLM_NO_USAGE_STATS": "1",
}
_LOGGING = {"VLLM_CONFIGURE_LOGGING": "0"}  # its messages then pass through the host's logging
_OVERRIDES = "VLLM_CPU_KVCACHE_SPACE"  # would win over the size that is passed


class HostState:
    """The process's environment and thread setting, which vLLM changes."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Set what vLLM needs, and afterwards restore the process's settings, except `VLLM_*`."""
        before = dict(os.environ)
        set_num_threads = torch.set_num_threads
        os.environ.update({**_LOGGING, **before, **_SETTINGS})
        os.environ.pop(_OVERRIDES, None)
        if "VLLM_LOGGING_LEVEL" not in before:
            logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of what we intend

        try:
            yield
        finally:
            for name in list(os.environ):
                if name not in before and not name.startswith("VLLM_"):
                    del os.environ[name]
            for name, value in before.items():
                if not name.startswith("VLLM_") or name == _OVERRIDES:
                    os.environ[name] = value
            torch.set_num_threads = set_num_threads
            gc.unfreeze()  # vLLM exempts all living objects, also the host's, from collection


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Restore the process's random states afterwards, also those of `device`."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def keep_default_group() -> None:
    """Let a dropped engine destroy the process groups that it made, and no others."""
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
    """Make a name that no other job and no earlier engine has; every rank of the job calls this."""
    return from_first(uuid.uuid4().hex, None)


def name_shared_memory(job: str) -> None:
    """Put `job` into the names of the shared memory of tensor-parallel ranks on a CPU."""
    from vllm.distributed.device_communicators import cpu_communicator

    def make_group_name(communicator: Any) -> str:
        ranks = "-".join(str(rank) for rank in communicator.ranks)
        return f"mrlhf-{job}-{communicator.unique_name.replace('/', '_')}-{ranks}"

    cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def remove_memory_names(job: str) -> None:
    """Remove the names of the job's shared memory; every rank of the job calls this."""
    dist.barrier()  # All ranks have opened the memory, which is freed with the last of them.
    for file in _SHARED_MEMORY.glob(f"mrlhf-{job}-*"):
        file.unlink(missing_ok=True)
    for memory in _memory_of_queues():
        memory.is_creator = False  # whose destructor would remove the name once more
        memory.shared_memory.unlink()


def _memory_of_queues() -> list[Any]:
    """Return the shared memory that this rank has made for the message queues of vLLM's groups."""
    from vllm.distributed import parallel_state

    groups = [find() for find in parallel_state._groups.values()]
    queues = [group.mq_broadcaster for group in groups if group is not None]
    memories = [queue.buffer for queue in queues if queue is not None]
    return [memory for memory in memories if memory is not None and memory.is_creator]


def repack_output_layer(model: Any) -> None:
    """Pack a tied output layer again: on a CPU it has a packed copy of the shared embedding."""
    if "lm_head.weight" not in dict(model.named_parameters()):
        layer = getattr(model, "lm_head", model.model.embed_tokens)  # Gemma 2 has no other name
        layer.quant_method.process_weights_after_loading(layer)


def pack_experts(experts: Any) -> None:
    """Pack the new weights of a layer's experts on a CPU: vLLM's own hook does so only once."""
    experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)


def drop_prefix_cache(llm: Any) -> None:
    """Forget the keys and values of all prompts; EngineError if requests still run."""
    if not llm.reset_prefix_cache():
        raise EngineError(
            "vLLM kept its prefix cache because requests are running; commit when nothing is in "
            "flight"
        )
