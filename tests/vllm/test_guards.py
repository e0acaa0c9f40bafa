"""Each guard: vLLM does its damage when the guard is taken away, and does none when it is there."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.vllm import guards
from mrlhf.inference.vllm.engine import VllmEngine
from tests.models.engines import answer, fill, spec_of
from tests.ranks import run_ranks
from tests.vllm.models import hf_greedy, hf_model, make_prompts, needs_vllm

pytestmark = needs_vllm
LIMITS = EngineLimits(max_num_seqs=8, max_length=128, max_prefill_tokens=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, seed=0)
LONG_PROMPTS = make_prompts(count=3, length=70)  # more than a block each


def _engine(model: Any, group: Any = None, weights: Any = None) -> VllmEngine:
    engine = VllmEngine(
        spec_of(model), group or dist.group.WORLD, torch.device("cpu"), torch.float32, LIMITS
    )
    _update(engine, model if weights is None else weights)
    return engine


def _update(engine: VllmEngine, model: Any, version: int = 1) -> None:
    fill(engine.weight_slots(), model)
    engine.commit(version)


@contextlib.contextmanager
def without(owner: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Inside, `owner.name` is the stand-in."""
    guard = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, guard)


def _nothing(*args: Any) -> None:
    pass


def _host_randomness_is_untouched() -> bool:
    model = hf_model("llama")
    prompts = make_prompts()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    answer(
        _engine(model),
        prompts,
        [0] * len(prompts),
        SamplingParams(temperature=1.0, max_tokens=4, seed=0),
    )
    return torch.equal(before, torch.get_rng_state())


def _follows(engine: VllmEngine, name: str) -> bool:
    """Whether new weights are answered with."""
    new = hf_model(name, seed=7)
    _update(engine, new, 2)
    prompts = make_prompts()
    answers = [s.token_ids for s in answer(engine, prompts, [0] * 6, GREEDY)]
    return answers == hf_greedy(new, prompts, 6)


def _tied_output_follows(engine: VllmEngine) -> bool:
    return _follows(engine, "qwen2-tied")


def _pack_by_the_hook(experts: Any) -> None:
    experts.quant_method.process_weights_after_loading(experts)


def _prefixes_are_forgotten(engine: VllmEngine) -> bool:
    """New weights are answered with, though the prompts have been seen under the old ones."""
    for version in (3, 4):
        new = hf_model("qwen2-tied", seed=version)
        _update(engine, new, version)
        answers = [s.token_ids for s in answer(engine, LONG_PROMPTS, [0] * 3, GREEDY)]
    return answers == hf_greedy(new, LONG_PROMPTS, 6)


def _default_group_survives() -> bool:
    engine = _engine(hf_model("llama"))
    del engine
    gc.collect()
    return dist.is_initialized()


def _one_rank(rank: int, world_size: int) -> dict[str, tuple[bool, bool]]:
    """For each guard, whether all is well with it and without."""
    found = {}
    tied = _engine(hf_model("qwen2-tied"))
    for name, stand_in, check in (
        ("repack_output_layer", _nothing, _tied_output_follows),
        ("drop_prefix_cache", _nothing, _prefixes_are_forgotten),
    ):
        with without(guards, name, stand_in):
            broken = check(tied)
        # The next commit must not meet what was left stale.
        _update(tied, hf_model("qwen2-tied"), 9)
        found[name] = check(tied), broken
    del tied
    gc.collect()
    guarded = _host_randomness_is_untouched()
    gc.collect()
    with without(guards, "randomness_kept", lambda device: contextlib.nullcontext()):
        found["randomness_kept"] = guarded, _host_randomness_is_untouched()
    gc.collect()
    guarded = _default_group_survives()
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = cleanup_dist_env_and_memory
    with without(guards, "keep_default_group", _nothing):
        found["keep_default_group"] = guarded, _default_group_survives()
    if not dist.is_initialized():  # the end of the rank needs a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_guards_of_one_rank() -> None:
    (found,) = run_ranks(1, _one_rank)
    assert found == {
        "repack_output_layer": (True, False),
        "drop_prefix_cache": (True, False),
        "randomness_kept": (True, False),
        "keep_default_group": (True, False),
    }


def _mixture(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether new experts are answered with, and whether they are without the guard."""
    engine = _engine(hf_model("mixtral"))
    with without(guards, "pack_experts", _pack_by_the_hook):
        broken = _follows(engine, "mixtral")
    return _follows(engine, "mixtral"), broken


def test_experts_are_packed_again() -> None:
    assert run_ranks(1, _mixture) == [(True, False)]


def _two_ranks(rank: int, world_size: int) -> tuple[bool, list[str], list[str], list[str]]:
    """Whether two ranks agree with transformers, and how two jobs name their shared memory.

    The names are those with the guard and those without it; the last are those that a process could
    leave behind.
    """
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cpu_communicator

    shared = cpu_communicator._CPUSHMDistributed
    communicator = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    unguarded = shared.__dict__["make_group_name"].__func__
    model = hf_model("llama")
    prompts = make_prompts()
    equal = True
    names = []
    names_without = []
    left_behind: list[str] = []
    for _ in range(2):
        engine = _engine(model)
        answers = [s.token_ids for s in answer(engine, prompts, [0] * 6, GREEDY)]
        equal = equal and answers == hf_greedy(model, prompts, 6)
        names.append(shared.make_group_name(communicator))
        names_without.append(unguarded(communicator))
        left_behind += [path.name for path in Path("/dev/shm").glob(f"{names[-1]}*")]
        queue = parallel_state.get_tp_group().mq_broadcaster
        assert queue is not None
        name = queue.buffer.shared_memory.name
        left_behind += [path.name for path in Path("/dev/shm").glob(name.lstrip("/"))]
        del engine
        gc.collect()
    return equal, names, names_without, left_behind


def test_shared_memory_has_a_name_of_its_own() -> None:
    """If two jobs share a name, the second fails, where vLLM exchanges data in shared memory."""
    first, second = run_ranks(2, _two_ranks)
    equal, names, names_without, left_behind = first
    equal_too, names_too, _, _ = second
    assert equal and equal_too
    assert names == names_too and names[0] != names[1]
    assert names_without[0] == names_without[1]
    assert left_behind == []
