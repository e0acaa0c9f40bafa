"""Follows the memory and the graphs of the engine over hand-overs, on the simulated device."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.engine_loop import generate, requests_for
from mrlhf.config.sections import ActorSection
from mrlhf.device import Fetch
from mrlhf.inference.base import EngineLimits, EngineStats, Request, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inference.sizes import CacheShape
from mrlhf.models.families import FAMILIES
from mrlhf.models.lora import is_adapter
from mrlhf.models.spec import Lora, ModelSpec
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training import optimizer_states
from mrlhf.weights.init import initialise
from tests.device import measures
from tests.simulated_device.state import DEVICE

NEVER_SHARED = "mlp.linear_fc2.weight"
MiB = 1 << 20


def moments() -> dict[str, int]:
    """Bytes by which an optimizer and its first step add to the memory that stays."""
    measures.join()
    engine, actor = measures.actor_of(packs=2, layers=2)
    experience = measures.example()
    cut = engine.cut(experience.rollout.sequences(), "response")
    before = _held()
    engine.attach_optimizer(measures.OPTIM, total_updates=100)
    attached = _held()

    optimizer = engine.optimizer
    assert optimizer is not None
    parameters = [slot.parameter for slot in engine.slots]
    kept = [held.moments for held in optimizer.ranges(parameters) if held is not None]
    steps = optimizer.steps_taken
    actor.update(experience, cut)

    return {
        "parameters": sum(parameter.numel() for parameter in set(parameters)),
        "attached": attached - before,
        "first step": _held() - attached,
        "moments in a checkpoint before it": sum(map(len, kept)),
        "steps before it": steps,
        "steps": optimizer.steps_taken,
    }


def offloaded() -> dict[str, Any]:
    """Bytes on the device between passes and in them, and whether two updates are the same."""
    measures.join()
    experience = measures.example()
    found: dict[str, Any] = {}
    weights = []
    forms: dict[str, tuple[list[str], str | None]] = {
        "nothing": ([], None),
        "everything": (["params", "grads", "optimizer"], None),
        "in parts": (["params", "grads"], "host"),
    }

    for form, (offload, stream) in forms.items():
        before = _held()
        engine, actor = measures.actor_of(packs=2, layers=2, offload=offload)
        optim = measures.OPTIM.model_copy(update={"stream": stream})
        engine.attach_optimizer(optim, total_updates=100)
        cut = engine.cut(experience.rollout.sequences(), "response")
        row: dict[str, Any] = {"attached": _held() - before}
        for _ in range(2):
            actor.evaluate(experience.rollout, cut)
            with (
                DEVICE.counted() as counts,
                mock.patch.object(optimizer_states, "STREAMED_BYTES", 8192),
            ):
                actor.update(experience, cut)
        row |= {"updated": _held() - before, "waits": counts.waits.total()}
        copies = [what for what, line in counts.copies if "residency" in line]
        row["staged"] = [what for what in copies if "unpinned" in what]
        row["copies"] = len(copies)
        with engine.training():
            row["needed"] = _held() - before
            weights.append([slot.parameter.cpu().clone() for slot in engine.slots])
        row["ledger"] = sum(engine.residency.nbytes.values())
        row["grads"] = engine.residency.nbytes["grads"]
        row["pinned"] = sum(DEVICE.host.registered.values())
        found[form] = row
        engine.residency.close()
        row["pinned after it"] = sum(DEVICE.host.registered.values())
        del engine, actor, cut
        gc.collect()

    found["same"] = [all(map(torch.equal, weights[0], others)) for others in weights[1:]]
    return found


def memory() -> dict[str, Any]:
    """Bytes allocated and reserved in a hand-over, with weights of the engine's own and without."""
    training = _training()
    engine = _engine(cache_bytes=None)
    shared = sum(tensor.nbytes for name, tensor in training.items() if NEVER_SHARED not in name)
    own = sum(tensor.nbytes for tensor in training.values()) - shared
    found: dict[str, Any] = {"own": own, "samples": []}

    for version in (1, 2):
        before = _held()
        engine.wake()
        _hand_over(engine, training, version, copied=NEVER_SHARED)
        found[f"weights {version}"] = _held() - before
        engine.take_cache()
        found[f"cache {version}"] = engine.cache_bytes
        found["samples"].append(_samples(engine))
        torch.cuda.empty_cache()
        reserved = DEVICE.memory.reserved
        cache = engine.cache_bytes
        engine.sleep(free_weights=True)
        found[f"given back {version}"] = reserved - DEVICE.memory.reserved - cache
        found[f"left {version}"] = _held() - before
    return found


def sizes() -> list[int]:
    """Sizes of the cache with half a block to spare, with one block more, and with much less."""
    training = _training()
    engine = _engine(cache_bytes=None)
    _hand_over(engine, training, version=1)
    torch.cuda.empty_cache()
    kept = DEVICE.memory.total - int(0.9 * DEVICE.memory.total)
    block = engine._cache_shape.block_bytes
    found = []

    for blocks in (12.5, 13.5, 7.5):
        filler = DEVICE.memory.free - kept - int(blocks * block)
        other = torch.empty(filler, dtype=torch.uint8, device=DEVICE.device)
        engine.take_cache()
        found.append(engine.cache_bytes // block)
        del other
        engine.sleep()
        torch.cuda.empty_cache()

    return found


def graphs() -> dict[str, Any]:
    """Captures after each kind of hand-over, and whether its samples are those of a new engine."""
    training = _training()
    engine = _engine(cache_bytes=8 * MiB)
    held: list[Any] = []
    found: dict[str, Any] = {}

    def step(name: str, sleeps: bool) -> None:
        old = _places(engine)
        if sleeps:
            engine.sleep(free_weights=True)
            engine.wake()

        _hand_over(engine, training, version=1)
        with DEVICE.counted() as counts:
            ours = _samples(engine)
        other = _engine(cache_bytes=8 * MiB)
        _hand_over(other, training, version=1)
        found[name] = {
            "captures": counts.captures,
            "replays": counts.replays,
            "moved": old != _places(engine),
            "right": ours == _samples(other),
        }

    step("first", sleeps=False)
    training["decoder.layers.1." + NEVER_SHARED].mul_(-1.0)
    step("new weights", sleeps=False)
    step("after sleep", sleeps=True)
    assert engine._cache is not None
    held += engine._cache.layers  # so that the next cache lies elsewhere
    step("other cache", sleeps=True)
    held.append(training["decoder.layers.0." + NEVER_SHARED])
    training["decoder.layers.0." + NEVER_SHARED] = held[-1].clone()
    step("other weight", sleeps=False)
    return found


def graphs_of_copies() -> dict[str, Any]:
    """Captures and copies of experts at three versions of an actor with experts or adapters."""
    measures.join()
    found: dict[str, Any] = {}
    for name, mixture in (("experts", True), ("adapters", False), ("both", True)):
        lora = None if name == "experts" else Lora(rank=4, alpha=32.0)
        spec = replace(measures.model_spec(2, mixture), lora=lora)
        section = ActorSection(path="random", dtype="bfloat16", ppo_epochs=1, loss_scale_factor=1.0)
        layout = ParallelLayout.for_world("actor", 1, AxisSizes())
        trained = measures.build_actor(section, spec, layout)[0]
        engine = NativeEngine(spec, None, DEVICE.device, torch.bfloat16, _limits(8 * MiB))
        rows = []
        for version in (1, 2, 3):
            for slot in trained.slots:  # a base is frozen
                if lora is None:
                    slot.parameter.data.mul_(-1.1)
                elif is_adapter(slot.piece.name):
                    slot.parameter.data.add_(0.1 * version)
            before = [slot.parameter.data_ptr() for slot in trained.slots]
            for slot in trained.slots:
                engine.bind(slot.piece.parameter, slot.parameter.detach())
            engine.commit(version)
            with DEVICE.counted() as counts:
                ours = _samples(engine)
            other = NativeEngine(spec, None, DEVICE.device, torch.bfloat16, _limits(8 * MiB))
            for slot in trained.slots:
                other.bind(slot.piece.parameter, slot.parameter.detach())
            other.commit(version)
            assert engine._decoder is not None
            apart = [x for x in engine._decoder.stacks if x.data_ptr() not in before]
            row = {"captures": counts.captures, "right": ours == _samples(other)}
            rows.append({**row, "copied": len(apart), "samples": ours})
        found[name] = rows
    return found


def _held() -> int:
    gc.collect()
    return DEVICE.memory.allocated


def _training() -> dict[str, Tensor]:
    """Parameters as training has them."""
    engine = _engine(cache_bytes=MiB)
    spec = measures.model_spec(2)
    family = FAMILIES[spec.family]
    slots = engine.weight_slots()
    initialise(slots, family.tensor_shapes(spec), 1, 0.2)
    return {slot.piece.parameter: slot.parameter.clone() for slot in slots}


def _engine(cache_bytes: int | None) -> NativeEngine:
    spec = measures.model_spec(2)
    return NativeEngine(spec, None, DEVICE.device, torch.bfloat16, _limits(cache_bytes))


def _limits(cache_bytes: int | None) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=6, max_length=320, max_prefill_tokens=64, cache_bytes=cache_bytes
    )


def _hand_over(
    engine: NativeEngine, training: dict[str, Tensor], version: int, copied: str = "none"
) -> None:
    for name, tensor in training.items():
        if copied not in name:
            engine.bind(name, tensor)
    for slot in engine.weight_slots():
        if copied in slot.piece.parameter:
            slot.parameter.copy_(training[slot.piece.parameter])
    engine.commit(version)


def _samples(engine: NativeEngine) -> list[tuple[list[int], list[float]]]:
    prompts = [[1, 2, 3], [7] * 40, [5, 6]]
    sampling = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
    samples = generate(engine, requests_for(prompts, [0, 1, 2], sampling, None)).samples
    return [(sample.token_ids, sample.logprobs) for sample in samples]


def _places(engine: NativeEngine) -> tuple[int, ...]:
    assert engine._graphs is not None
    return engine._graphs.places


def overlap() -> dict[str, Any]:
    """Samples with captured steps and without, and what was launched when the host waited."""
    cases: dict[str, dict[str, Any]] = {
        "lengths": {},
        "stop tokens": {"stop_token_ids": tuple(range(0, 1000, 7))},
        "stop strings": {"stop": ("7 ", "13")},
        "small cache": {"blocks": 10},
        "cancelled": {"cancel": 20},
        "delta nets": {"spec": measures.delta_spec(2)},
        "latents": {"spec": measures.latent_spec(2)},
        "chosen latents": {"spec": measures.latent_spec(2, chosen=9)},
    }
    return {name: _overlap(**options) for name, options in cases.items()}


def _overlap(
    blocks: int = 90, cancel: int = -1, spec: ModelSpec | None = None, **options: Any
) -> dict[str, Any]:
    spec = spec or measures.model_spec(2)
    shape = CacheShape.on_rank(spec, 1, 4, 16)
    limits = EngineLimits(
        max_num_seqs=6,
        max_length=128,
        max_prefill_tokens=24,
        block_size=16,
        cache_bytes=blocks * shape.block_bytes + 7 * shape.state_bytes,  # a slot is for padding
    )
    ahead: Counter[int] = Counter()
    begin = Fetch.__init__
    wait = Fetch.wait

    def counted_begin(fetch: Fetch, *tensors: Tensor) -> None:
        begin(fetch, *tensors)
        launched[id(fetch)] = DEVICE.counts.replays

    def counted_wait(fetch: Fetch) -> list[Tensor]:
        ahead[DEVICE.counts.replays - launched[id(fetch)]] += 1
        return wait(fetch)

    launched: dict[int, int] = {}
    with (
        mock.patch.object(Fetch, "__init__", counted_begin),
        mock.patch.object(Fetch, "wait", counted_wait),
    ):
        ours, stats = _come_and_go(spec, limits, cancel, options)
    theirs, others = _come_and_go(spec, replace(limits, enforce_eager=True), -1, options)
    return {
        "ahead": dict(ahead),
        "samples": len(ours),
        "of": len(theirs),
        "same": all(theirs[key] == sample for key, sample in ours.items()),
        "preemptions": (stats.preemptions, others.preemptions),
    }


def _come_and_go(
    spec: ModelSpec, limits: EngineLimits, cancel: int, options: dict[str, Any]
) -> tuple[dict[tuple[int, int], list[int]], EngineStats]:
    """Tokens by request and sample, where requests come one by one, with one token and more."""
    text = "".join
    engine = NativeEngine(
        spec, None, DEVICE.device, torch.float32, limits,
        decode=lambda tokens: text(f"{token} " for token in tokens),
    )  # fmt: skip
    family = FAMILIES[spec.family]
    initialise(engine.weight_slots(), family.tensor_shapes(spec), 1, 0.2)
    engine.commit(1)

    coming = [
        Request(
            id=number, prompt=[number + 1] * length, uid=number, samples=range(1 + number % 2),
            sampling=SamplingParams(
                temperature=1.0, max_tokens=3 + 17 * (number % 5), seed=5, **options
            ),
        )
        for number, length in enumerate((1, 20, 3, 1, 50, 2, 1, 30, 1, 1, 7, 1))
    ]  # fmt: skip
    found: dict[tuple[int, int], list[int]] = {}
    stats = EngineStats()
    step = 0
    while coming or engine.in_flight:
        if coming and (step % 3 == 0 or not engine.in_flight):
            engine.submit([coming.pop(0) for _ in range(min(2, len(coming)))])
        if step == cancel:
            coming.clear()
        else:
            engine.step()
        finished = engine.cancel() if step == cancel else engine.collect()
        stats += finished.stats
        for sample in finished.samples:
            found[sample.request_id, sample.sample_index] = sample.token_ids
        step += 1
    return found, stats
