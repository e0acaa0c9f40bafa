"""Measures one NVIDIA GPU: the update, the memory of log-probabilities, and decoding, in bfloat16.

    PYTHONPATH=. python benchmarks/gpu.py --json runs/gpu.json      (or make bench-gpu)

The models have the shapes of Qwen3-0.6B and Qwen3-1.7B with random weights. It needs torch,
transformers, megatron-core and pydantic alone. Each row is written as soon as it is measured, and a
measure that fails leaves a row that says why. Without a GPU nothing is measured, unless `--size
tiny` tries the program itself on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from engine_loop import generate, requests_for
from generation_limits import read_bandwidth, work
from gpu_record import record
from model_sizes import qwen3_config
from torch import Tensor
from transformers import Qwen3Config

from mrlhf.batch import Experience, Prompts, Rollout
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.device import Device, Fetch, pick_device
from mrlhf.gpu.library import fallen_back
from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inference.native.runner import Runner
from mrlhf.models.families import FAMILIES
from mrlhf.models.flops import training_flops
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.roles.actor import Actor
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.init import initialise


class Work(NamedTuple):
    """What a size is measured with."""

    sequences: int  # of a batch to train on
    prompt_length: int
    response_length: int
    micro_batch_tokens: int
    decoded_at_once: tuple[int, ...]  # sequences, of each row
    samples: tuple[int, int, int]  # prompts, samples of each, and how many are decoded at once


WORK = {
    "tiny": Work(4, 8, 8, 8192, (1, 16), (4, 2, 4)),
    "0.6B": Work(32, 256, 768, 16384, (1, 16, 64, 256), (128, 8, 256)),
    "1.7B": Work(32, 256, 768, 8192, (1, 16, 64, 256), (128, 8, 256)),
}
MAX_PREFILL_TOKENS = 8192
REPEATS = 3


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--size", choices=WORK, action="append", help="0.6B and 1.7B")
    parser.add_argument("--strict", action="store_true", help="fail where a kernel does not work")
    arguments = parser.parse_args()
    sizes = arguments.size or ["0.6B", "1.7B"]
    if not torch.cuda.is_available() and sizes != ["tiny"]:
        print(f"skipped: benchmarks of {', '.join(sizes)}: need a CUDA GPU")
        return

    device = pick_device("auto", local_rank=0)
    backend = "gloo" if device.kind == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for measure in (train, decode, mixed, offload):
            for row in _rows_or_reason(measure, size, device, arguments.strict):
                print(row, flush=True)
                rows.append(row)
                if arguments.json is not None:
                    record(arguments.json, "benchmarks", rows)
            gc.collect()
            if device.kind == "cuda":
                torch.cuda.empty_cache()

    dist.destroy_process_group()
    sys.exit(any(row.get("outcome", "").startswith("failed") for row in rows))


def _rows_or_reason(
    measure: Callable[[str, Device], Iterator[dict[str, Any]]],
    size: str,
    device: Device,
    strict: bool = False,
) -> Iterator[dict[str, Any]]:
    """The rows of a measure as it finds them; if it fails, a last row says why.

    A `strict` measure fails if torch's operators have taken the place of a kernel.

    So a failure costs neither the rows before it nor the measures after it.
    """
    about = {"what": measure.__name__, "size": size}
    try:
        with compilations() as seconds:
            for row in measure(size, device):
                fault = fallen_back() if strict else ""
                if fault:
                    raise RuntimeError(fault)
                yield row
        yield {**about, "compilations": len(seconds), "compile_seconds": sum(seconds)}
    except torch.OutOfMemoryError:
        yield {**about, "outcome": "out of memory"}
    except Exception as error:
        traceback.print_exc()
        yield {**about, "outcome": f"failed: {type(error).__name__}: {error}"}


def train(size: str, device: Device) -> Iterator[dict[str, Any]]:
    """The actor's update, and its evaluation, over one batch."""
    spec, _ = _model(size)
    section = _section(size)
    engine = _trained(section, size, device)
    actor = Actor(engine, PolicyLossSettings.named("vanilla", section, None), 1.0)

    rollout = _rollout(size, spec.vocab_size)
    cut = engine.cut(rollout.sequences(), "response")
    held = _allocated(device)
    logprobs, evaluation = _peak(lambda: actor.evaluate(rollout, cut).logprobs, device)
    experience = _experience(rollout, logprobs)
    _, peak = _peak(lambda: actor.update(experience, cut), device)

    rows = zip(rollout.prompt_lengths, rollout.response_lengths, strict=True)
    sequences = [(prompt + response, response) for prompt, response in rows]
    tokens = sum(length for length, _ in sequences)
    flops = training_flops(spec, sequences)
    peak_tflops = device.peak_tflops(torch.bfloat16)
    peak_flops = None if peak_tflops is None else peak_tflops * 1e12

    updating = _seconds(lambda: actor.update(experience, cut), device)
    yield {
        "what": "update",
        "size": size,
        "tokens": tokens,
        "seconds": updating,
        "tokens_per_s": tokens / updating,
        "mfu": None if peak_flops is None else flops / updating / peak_flops,
        "peak_bytes": peak,
    }

    evaluating = _seconds(lambda: actor.evaluate(rollout, cut), device)
    yield {
        "what": "log-probabilities",
        "size": size,
        "tokens": tokens,
        "seconds": evaluating,
        "tokens_per_s": tokens / evaluating,
        "mfu": None if peak_flops is None else flops / 3 / evaluating / peak_flops,
        "bytes_above_the_model": evaluation - held,
        "bytes_of_whole_logits": 2 * spec.vocab_size * max(len(p.select) for p in cut.packs),
    }


def offload(size: str, device: Device) -> Iterator[dict[str, Any]]:
    """Bytes that leave the GPU, and by how many the process grows on the host for them."""
    if device.kind == "cpu":
        return
    before = _resident()
    engine = _trained(_section(size, ["params", "grads", "optimizer"]), size, device)
    device.synchronize()
    taken = _resident() - before
    nbytes = engine.residency.nbytes
    yield {
        "what": "offload",
        "size": size,
        "pinned_bytes_asked": nbytes["params"] + nbytes["optimizer"],
        "pinned_bytes_taken": taken,
    }
    engine.residency.close()


def _resident() -> int:
    """Bytes of the process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def _section(size: str, offloaded: Sequence[str] = ()) -> ActorSection:
    return ActorSection(
        path="random",
        dtype="bfloat16",
        micro_batch_tokens=WORK[size].micro_batch_tokens,
        ppo_epochs=1,
        loss_scale_factor=1.0,
        optim=ActorOptimSection(lr=1e-6),
        offload=list(offloaded),
    )


def _trained(section: ActorSection, size: str, device: Device) -> ModelEngine:
    """A policy with random weights and an optimizer."""
    spec, _ = _model(size)
    layout = ParallelLayout.for_world("actor", 1, AxisSizes(tp=1, pp=1))
    groups = GroupFactory(timeout_s=600.0).role_groups(layout)
    engine = ModelEngine(section, spec, groups, device)
    engine.initialise(seed=1)
    engine.attach_optimizer(section.optim, total_updates=100)
    return engine


def decode(size: str, device: Device) -> Iterator[dict[str, Any]]:
    """Tokens that the native engine decodes, against what reading the weights and cache allows."""
    spec, config = _model(size)
    _, prompt_length, response_length, _, counts, _ = WORK[size]
    engine = _engine(size, max(counts), device)
    bandwidth = read_bandwidth(device.torch_device, time.perf_counter)
    for count in counts:
        prompts = _tokens(count, prompt_length, spec.vocab_size).tolist()
        first, whole = (
            _answer_seconds(engine, prompts, length, device) for length in (1, response_length)
        )
        decoded = count * (response_length - 1)
        _, all_read = work(config, prompt_length, [response_length] * count, itemsize=2)
        _, first_read = work(config, prompt_length, [1] * count, itemsize=2)
        possible = (all_read - first_read) / bandwidth
        yield {
            "what": "decode",
            "size": size,
            "sequences": count,
            "prompt_tokens": prompt_length,
            "response_tokens": response_length,
            "tokens_per_s": decoded / (whole - first),
            "memory_limit_tokens_per_s": decoded / possible,
            "share_of_memory_limit": possible / (whole - first),
            "read_bytes_per_s": bandwidth,
        }


def mixed(size: str, device: Device) -> Iterator[dict[str, Any]]:
    """Samples of unlike lengths that wait for places.

    The row says which share of passes is no CUDA graph, and how long the host works for a pass: all
    the time but that in which it waits for what was drawn.
    """
    spec, _ = _model(size)
    _, prompt_length, longest, *_, (prompts, samples, at_once) = WORK[size]
    engine = _engine(size, at_once, device)
    drawn = random.Random(1)
    sampling = SamplingParams(temperature=1.0, max_tokens=longest, seed=1)
    tokens = _tokens(prompts, prompt_length, spec.vocab_size).tolist()
    rows = [prompt for prompt in tokens for _ in range(samples)]
    requests = [
        replace(request, sampling=replace(sampling, max_tokens=drawn.randint(1, longest)))
        for request in requests_for(rows, list(range(len(rows))), sampling)
    ]

    run = Runner.run
    wait = Fetch.wait
    captured: list[bool] = []
    waited: list[float] = []

    def counted(self: Runner, arrays: Any, origins: Any, sampling: SamplingParams) -> Any:
        captured.append(origins is not None)
        return run(self, arrays, origins, sampling)

    def timed(self: Fetch) -> list[Tensor]:
        began = time.perf_counter()
        found = wait(self)
        waited.append(time.perf_counter() - began)
        return found

    generate(engine, requests)  # captures the graphs
    with mock.patch.object(Runner, "run", counted), mock.patch.object(Fetch, "wait", timed):
        began = time.perf_counter()
        found = generate(engine, requests).samples
        seconds = time.perf_counter() - began
    yield {
        "what": "mixed",
        "size": size,
        "sequences": at_once,
        "tokens_per_s": sum(len(sample.token_ids) for sample in found) / seconds,
        "passes": len(captured),
        "eager_share": 1 - sum(captured) / len(captured),
        "host_us": (seconds - sum(waited)) / len(captured) * 1e6,
    }


def _engine(size: str, at_once: int, device: Device) -> NativeEngine:
    """An engine with random weights, which decodes so many sequences at once."""
    spec, _ = _model(size)
    limits = EngineLimits(
        max_num_seqs=at_once,
        max_length=WORK[size].prompt_length + WORK[size].response_length,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
        cache_bytes=(1 << 26) if device.kind == "cpu" else None,
    )
    engine = NativeEngine(spec, None, device.torch_device, torch.bfloat16, limits)
    family = FAMILIES[spec.family]
    initialise(engine.weight_slots(), family.tensor_shapes(spec), 1, 0.02)
    engine.commit(1)
    return engine


def _model(size: str) -> tuple[ModelSpec, Qwen3Config]:
    config = qwen3_config(size)
    return FAMILIES["qwen3"].read_config(config.to_dict(), "lm"), config


def _tokens(rows: int, length: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(length))


def _rollout(size: str, vocab: int) -> Rollout:
    count, prompt_length, response_length, *_ = WORK[size]
    prompts = Prompts(
        token_ids=_tokens(count, prompt_length, vocab).tolist(),
        uid=list(range(count)),
        text=[""] * count,
        data_source=[""] * count,
        ground_truth=[""] * count,
        extra_info=[{} for _ in range(count)],
    )

    mask = torch.ones(count, response_length, dtype=torch.bool)
    return Rollout(
        prompts=prompts,
        sample_index=[0] * count,
        response_ids=_tokens(count, response_length, vocab),
        response_mask=mask,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        versions=torch.zeros(mask.shape, dtype=torch.int32),
        stopped=mask[:, 0],
    )


def _experience(rollout: Rollout, logprobs: Tensor) -> Experience:
    shape = rollout.response_mask.shape
    return Experience(
        rollout=rollout,
        scores=torch.zeros(len(rollout)),
        loss_mask=rollout.loss_mask,
        old_logprobs=logprobs,
        ref_logprobs=None,
        token_rewards=torch.zeros(shape),
        values=None,
        advantages=torch.randn(shape, generator=torch.Generator().manual_seed(2)),
        returns=torch.zeros(shape),
    )


def _answer_seconds(
    engine: NativeEngine, prompts: Sequence[list[int]], length: int, device: Device
) -> float:
    """Seconds to answer all prompts with `length` tokens each."""
    sampling = SamplingParams(temperature=1.0, max_tokens=length, seed=1)
    requests = requests_for(prompts, list(range(len(prompts))), sampling)

    def answer() -> None:
        samples = generate(engine, requests).samples
        assert all(len(sample.token_ids) == length for sample in samples)

    answer()  # captures the graphs
    return _seconds(answer, device)


def _seconds(call: Callable[[], Any], device: Device) -> float:
    """The median of some calls; the first one, which compiles and captures, has been made."""
    seconds = []
    with compilations() as late:
        for _ in range(REPEATS):
            device.synchronize()
            began = time.perf_counter()
            call()
            device.synchronize()
            seconds.append(time.perf_counter() - began)
    if late:
        print(f"{len(late)} kernels were compiled while it was timed, which then runs more slowly")
    return statistics.median(seconds)


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Seconds of each compilation of a kernel from here on, also of one that a cache spares."""
    seconds: list[float] = []
    if importlib.util.find_spec("triton") is None:
        yield seconds
        return
    from triton import knobs

    before = knobs.compilation.listener

    def hear(*, times: Any, **about: Any) -> None:
        seconds.append(times.total / 1e6)
        if before is not None:
            before(times=times, **about)

    knobs.compilation.listener = hear
    try:
        yield seconds
    finally:
        knobs.compilation.listener = before


def _allocated(device: Device) -> int:
    """Bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device.torch_device) if device.kind == "cuda" else 0


def _peak(call: Callable[[], Any], device: Device) -> tuple[Any, int]:
    """What the call returns, and the most bytes of tensors on the GPU during it; 0 on a CPU."""
    if device.kind == "cpu":
        return call(), 0
    torch.cuda.reset_peak_memory_stats(device.torch_device)
    result = call()
    return result, torch.cuda.max_memory_allocated(device.torch_device)


if __name__ == "__main__":
    main()
