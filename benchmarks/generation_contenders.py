"""The engines that `generate.py` compares, behind one call: prompts in, tokens out.

All hold the weights of one Hugging Face directory. Ours and vLLM also compute the log-prob of each
token that they draw, as training needs it; `transformers` gives tokens alone. This file measures
nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from engine_loop import generate, requests_for
from transformers import AutoModelForCausalLM

from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.models.families import load_spec
from mrlhf.models.weight_files import read_model

MAX_PREFILL_TOKENS = 8192
CACHE_BYTES = 2**30
# Of each engine's weights and cache: all contenders share one GPU.
GPU_MEMORY_UTILIZATION = 0.3
# Ways of transformers to compute experts, and to keep keys and values (None: the default).
EXPERTS = ("eager", "batched_mm", "grouped_mm")
CACHES = (None, "static")
# A way that takes so many times as long as another in a brief try is tried no further.
_HOPELESS = 3.0


@dataclass(frozen=True)
class Setting:
    """What a contender is built for."""

    directory: Path  # holds config.json and safetensors
    device: torch.device  # "cpu" or "cuda"
    dtype: torch.dtype  # dtype of weights, activations and cache
    max_num_seqs: int  # sequences decoded at once
    max_length: int  # tokens of the longest prompt and response together


class Contender(Protocol):
    """An engine that holds the weights."""

    note: str  # what a reader of the figures should know of it; "" for nothing

    def prepare(self) -> None:
        """Forget what was computed for earlier calls; its time is not measured."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, samples: int = 1
    ) -> list[list[int]]:
        """So many responses to each prompt, stop token included."""
        ...


class Native:
    """mrlhf's own engine."""

    note = ""

    def __init__(self, setting: Setting) -> None:
        spec = load_spec(str(setting.directory), "lm")
        self._on_cpu = setting.device.type == "cpu"
        limits = EngineLimits(
            max_num_seqs=setting.max_num_seqs,
            max_length=setting.max_length,
            max_prefill_tokens=MAX_PREFILL_TOKENS,
            cache_bytes=CACHE_BYTES if self._on_cpu else None,
            gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
        )
        self._engine = NativeEngine(spec, None, setting.device, setting.dtype, limits)
        self._engine.wake()
        read_model(setting.directory, spec, self._engine.weight_slots(), needs_head=False)
        self._engine.commit(0)

    def prepare(self) -> None:
        """A new version of the weights drops what was cached.

        On a GPU it would drop the CUDA graphs too. There nothing is dropped: no prompt comes twice.
        """
        if self._on_cpu:
            self._engine.commit(0)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, samples: int = 1
    ) -> list[list[int]]:
        """So many responses to each prompt, stop token included."""
        requests = [
            replace(request, samples=range(samples))
            for request in requests_for(prompts, range(len(prompts)), sampling)
        ]
        return [list(sample.token_ids) for sample in generate(self._engine, requests).samples]


class Transformers:
    """`generate` of transformers: one padded batch, which ends with its longest response.

    Of its ways to compute experts and to keep keys and values the fastest is taken.
    """

    def __init__(self, setting: Setting) -> None:
        model = AutoModelForCausalLM.from_pretrained(setting.directory, dtype=setting.dtype)
        self._model = model.to(setting.device).eval()
        self._device = setting.device
        self._cache: str | None = None
        self.note = ""
        if hasattr(model.config, "num_experts"):
            self._take_the_fastest()

    def prepare(self) -> None:
        """Do nothing: no call keeps anything."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, samples: int = 1
    ) -> list[list[int]]:
        """So many responses to each prompt, stop token included; all prompts have one length."""
        ids = torch.tensor(prompts, device=self._device)
        stops = list(sampling.stop_token_ids)

        settings: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            settings = {"do_sample": True, "top_k": 0, "top_p": 1.0}
            settings["temperature"] = sampling.temperature

        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_tokens,
            eos_token_id=stops or None,
            pad_token_id=0,
            cache_implementation=self._cache,
            num_return_sequences=samples,
            **settings,
        )
        return [_until(row, set(stops)) for row in output[:, ids.shape[1] :].tolist()]

    def _take_the_fastest(self) -> None:
        """Find the fastest way to compute experts with the default cache, then the best cache."""
        self._seconds(EXPERTS[0], CACHES[0], new_tokens=2)  # what only the first call does
        brief = {way: self._seconds(way, CACHES[0], new_tokens=2) for way in EXPERTS}
        near = [way for way in EXPERTS if brief[way] < _HOPELESS * min(brief.values())]

        seconds = {(way, CACHES[0]): self._seconds(way, CACHES[0], new_tokens=16) for way in near}
        experts, _ = min(seconds, key=seconds.__getitem__)
        for cache in CACHES[1:]:
            self._seconds(experts, cache, new_tokens=2)
            seconds[experts, cache] = self._seconds(experts, cache, new_tokens=16)

        ways = sorted(seconds, key=seconds.__getitem__)
        self._use(*ways[0])
        tried = [f"{_words(*way)} {seconds[way] / seconds[ways[0]]:.2f}" for way in ways]
        tried += [
            f"{way} {brief[way] / min(brief.values()):.2f} in a brief try, after which it was left"
            for way in EXPERTS
            if way not in near
        ]
        self.note = (
            f"processor time of its ways over that of the first, which was taken: "
            f"{', '.join(tried)}"
        )

    def _seconds(self, experts: str, cache: str | None, new_tokens: int) -> float:
        """Seconds of the processor for 32 prompts of 32 tokens with `new_tokens` new ones each.

        A brief try has prompts of 2 tokens, since some ways take minutes for long ones.
        """
        length = 32 if new_tokens > 2 else 2
        prompts = [[1 + (7 * row + place) % 500 for place in range(length)] for row in range(32)]
        self._use(experts, cache)
        began = time.process_time()
        self.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new_tokens, seed=0))
        return time.process_time() - began

    def _use(self, experts: str, cache: str | None) -> None:
        self._model.set_experts_implementation(experts)
        self._cache = cache


class VLLM:
    """vLLM's own `LLM`, in this process.

    On a CPU it does not compile: that makes it some 6 % faster and its start half a minute longer.
    """

    note = ""

    def __init__(self, setting: Setting) -> None:
        quiet = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        # It then uses the threads of OMP_NUM_THREADS, as the others do.
        os.environ.update(quiet, VLLM_CPU_OMP_THREADS_BIND="nobind")
        logging.getLogger("vllm").setLevel(logging.ERROR)
        import vllm

        on_cpu = setting.device.type == "cpu"
        memory: dict[str, Any] = {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION}
        if on_cpu:
            memory = {"kv_cache_memory_bytes": CACHE_BYTES}

        self._vllm = vllm
        self._llm = vllm.LLM(
            model=str(setting.directory),
            skip_tokenizer_init=True,
            enforce_eager=on_cpu,
            dtype=str(setting.dtype).removeprefix("torch."),
            max_model_len=setting.max_length,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=MAX_PREFILL_TOKENS,
            logprobs_mode="processed_logprobs",
            **memory,
        )

    def prepare(self) -> None:
        """Drop the prefix cache."""
        self._llm.reset_prefix_cache()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, samples: int = 1
    ) -> list[list[int]]:
        """So many responses to each prompt, stop token included."""
        params = self._vllm.SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            n=samples,
            logprobs=0,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(one.token_ids) for output in outputs for one in output.outputs]


CONTENDERS: dict[str, type[Native] | type[VLLM] | type[Transformers]] = {
    "native": Native,
    "vllm": VLLM,
    "transformers": Transformers,
}


def _words(experts: str, cache: str | None) -> str:
    return f"{experts} with a {cache or 'dynamic'} cache"


def _until(tokens: list[int], stops: set[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens
