"""Draws samples with every option of sampling, on the simulated device and on the host."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.engine_loop import generate, requests_for
from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.models.families import FAMILIES
from mrlhf.weights.init import initialise
from tests.device.measures import VOCABULARY, model_spec
from tests.simulated_device.state import DEVICE

HEAD = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.6},
    "both": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "recorded": {"temperature": 1.0, "top_k": 40, "top_p": 0.8, "record_masks": True},
    "head": {"temperature": 0.8, "record_head": HEAD},
    "several samples of a prompt": {"temperature": 1.0, "n": 3},
    "stop tokens": {"temperature": 1.0, "top_k": 3, "stop_token_ids": tuple(range(0, 1000, 7))},
    "stop strings": {"temperature": 1.0, "stop": ("7 ", "13")},
}
NEVER = [3, 5, 8]
PROMPTS = (1, 8, 70, 3, 20, 270, 11, 2, 9)  # more than a graph takes, pages and prefill chunks


def compare() -> dict[str, dict[str, Any]]:
    """By option, whether the tokens of both are the same, and the largest gap of a log-prob."""
    found: dict[str, dict[str, Any]] = {}
    host = _engine(torch.device("cpu"), eager=True)
    for eager in (False, True):
        device = _engine(DEVICE.device, eager)
        for name, options in OPTIONS.items():
            ours = _samples(device, options)
            theirs = _samples(host, options)
            pairs = list(zip(ours, theirs, strict=True))
            found[f"{name}, {'eager' if eager else 'graphs'}"] = {
                "same": sum(_are_same(a, b) for a, b in pairs) / len(pairs),
                "gap": max(_gap(a, b) for a, b in pairs),
                "never": any(token in NEVER for a in ours for token in a.token_ids),
                "lengths": sorted({len(a.token_ids) for a in ours}),
            }

    return found


def _are_same(a: Any, b: Any) -> bool:
    return a.token_ids == b.token_ids and _recorded(a)[0] == _recorded(b)[0]


def _recorded(sample: Any) -> tuple[Any, torch.Tensor]:
    """What could be drawn, or the likeliest tokens; and the log-probabilities of these."""
    masks = sample.masks
    if masks is None or set(masks.counts) != {2 * HEAD}:
        return masks, torch.zeros(0)
    ids, bits = torch.tensor(masks.words, dtype=torch.int32).view(-1, 2, HEAD).unbind(1)
    return ids.tolist(), bits.contiguous().view(torch.float32)


def _gap(a: Any, b: Any) -> float:
    if a.token_ids != b.token_ids:
        return 0.0
    drawn = torch.tensor(a.logprobs) - torch.tensor(b.logprobs)
    if not _are_same(a, b):
        return drawn.abs().max().item()
    return torch.cat([drawn, (_recorded(a)[1] - _recorded(b)[1]).flatten()]).abs().max().item()


def _samples(engine: NativeEngine, options: dict[str, Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in PROMPTS
    ]
    count = options.get("n", 1)
    sampling = SamplingParams(max_tokens=10, seed=5, **options)
    uids = list(range(len(prompts)))
    samples = generate(engine, requests_for(prompts, uids, sampling, None)).samples
    assert len(samples) == len(prompts) * count
    return samples


def _engine(device: torch.device, eager: bool) -> NativeEngine:
    spec = model_spec(2)
    limits = EngineLimits(
        max_num_seqs=6,
        max_length=320,
        max_prefill_tokens=64,
        cache_bytes=32 << 20,
        enforce_eager=eager,
    )
    engine = NativeEngine(spec, None, device, torch.float32, limits, decode=_text, never=NEVER)
    slots = engine.weight_slots()
    family = FAMILIES[spec.family]
    initialise(slots, family.tensor_shapes(spec), 1, 0.2)
    engine.commit(1)
    return engine


def _text(tokens: Any) -> str:
    return "".join(f"{token} " for token in tokens)
