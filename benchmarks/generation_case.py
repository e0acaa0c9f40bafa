"""Measures one model size, dtype and number of threads: all contenders take turns in one process.

`generate.py` starts it for each case, since the number of threads is fixed when a process starts.
Case and result are JSON. It knows no engine by name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from generation_contenders import CONTENDERS, Contender, Setting
from generation_limits import gemm_flops, read_bandwidth, work
from model_sizes import QWEN3
from model_sizes import SIZES as LLAMAS
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mrlhf.inference.base import SamplingParams

SIZES: dict[str, dict[str, int]] = {
    "3M": {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "110M": {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4,
    },
}  # fmt: skip
SIZES["SmolLM2-135M"] = LLAMAS["SmolLM2-135M"]
# Qwen3-MoE in all its layers.
_MIXTURE_13M = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
_MIXTURE_110M = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
SIZES |= {
    f"{size}-MoE-{count}of{per_token}": {
        **model,
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
    }
    for size, model, count, per_token, width in (
        ("13M", _MIXTURE_13M, 8, 2, 512),
        ("13M", _MIXTURE_13M, 16, 4, 256),
        ("13M", _MIXTURE_13M, 64, 8, 64),
        ("110M", _MIXTURE_110M, 8, 2, 1024),
        ("110M", _MIXTURE_110M, 32, 4, 256),
        ("110M", _MIXTURE_110M, 64, 8, 128),
    )
}
SIZES |= QWEN3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# On a machine that others load, the processor time of a process with one thread tells more.
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
GREEDY_TOKENS = 8
MAX_POSITIONS = 1024


def main() -> None:
    """Measure a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", help="JSON: as `generate.py` makes it")
    parser.add_argument("out", help="JSON file to write")
    arguments = parser.parse_args()

    case = json.loads(arguments.case)
    torch.set_num_threads(case["threads"])
    with tempfile.TemporaryDirectory() as directory:
        result = _measure(case, Path(directory))
    Path(arguments.out).write_text(json.dumps(result))


def _measure(case: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[case["dtype"]]
    config = _write_model(case["size"], dtype, directory)
    workloads = case["workloads"]

    # Where the processor has no bfloat16 instructions, float32 is what it multiplies fastest.
    clock = CLOCKS[case["clock"]]
    batch = workloads[0]["prompts"] * workloads[0]["samples"]
    speeds = [gemm_flops(config, batch, device, kind, clock) for kind in (dtype, torch.float32)]
    limits = {"gemm_flops": max(speeds), "read_bandwidth": read_bandwidth(device, clock)}

    setting = Setting(
        directory,
        device,
        dtype,
        max_num_seqs=max(workload["prompts"] * workload["samples"] for workload in workloads),
        max_length=max(item["prompt_length"] + item["max_tokens"] for item in workloads),
    )
    contenders, failed = _build(case["contenders"], setting)

    agreement = _agreement(contenders, workloads[0], config)
    compared = [
        _compare(contenders, workload, config, limits, case["repeats"], clock)
        for workload in workloads
    ]
    return {
        **case,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()),
        "limits": limits,
        "failed": failed,
        "notes": {name: contender.note for name, contender in contenders.items()},
        "greedy_agreement": agreement,
        "workloads": compared,
    }


def _build(names: list[str], setting: Setting) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders, and the reason for each that is absent or cannot run here."""
    contenders: dict[str, Contender] = {}
    failed = {}
    for name in names:
        try:
            contenders[name] = CONTENDERS[name](setting)
        except Exception as error:  # the others are measured all the same
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            sys.stderr.write(f"{name} is left out: {failed[name]}\n")
    return contenders, failed


def _write_model(size: str, dtype: torch.dtype, directory: Path) -> PreTrainedConfig:
    torch.manual_seed(0)
    kind = Qwen3Config if size in QWEN3 else LlamaConfig
    if "num_experts" in SIZES[size]:
        kind = Qwen3MoeConfig
    config = kind(
        **{**SIZES[size], "tie_word_embeddings": True},
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )

    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(directory)
    return config


def _prompts(
    workload: Mapping[str, Any], config: PreTrainedConfig, number: int = 0
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 * workload["prompts"] + number)
    shape = (workload["prompts"], workload["prompt_length"])
    rows: list[list[int]] = torch.randint(1, config.vocab_size, shape, generator=generator).tolist()
    return rows


def _sampling(workload: Mapping[str, Any], config: PreTrainedConfig) -> SamplingParams:
    """Temperature 1, and stop tokens that end responses at the workload's mean length.

    There are as many stop tokens as make each drawn token one of them with probability 1 / mean.
    """
    stops: tuple[int, ...] = ()
    if workload["mean_tokens"] is not None:
        generator = torch.Generator().manual_seed(2)
        count = round(config.vocab_size / workload["mean_tokens"])
        stops = tuple(torch.randperm(config.vocab_size, generator=generator)[:count].tolist())
    return SamplingParams(
        temperature=1.0, max_tokens=workload["max_tokens"], stop_token_ids=stops, seed=0
    )


def _agreement(
    contenders: Mapping[str, Contender], workload: Mapping[str, Any], config: PreTrainedConfig
) -> dict[str, float]:
    """Share of the greedy tokens before a response first differs from that of transformers."""
    prompts = _prompts(workload, config)
    sampling = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS, seed=0)

    responses = {}
    for name, contender in contenders.items():
        contender.prepare()
        responses[name] = contender.generate(prompts, sampling)

    if "transformers" not in responses:
        return {}
    return {
        name: statistics.fmean(map(_common, rows, responses["transformers"]))
        for name, rows in responses.items()
    }


def _common(one: list[int], other: list[int]) -> float:
    """Share of the tokens before the first difference."""
    equal = 0
    for a, b in zip(one, other, strict=True):
        if a != b:
            break
        equal += 1
    return equal / len(other)


def _compare(
    contenders: Mapping[str, Contender],
    workload: Mapping[str, Any],
    config: PreTrainedConfig,
    limits: Mapping[str, float],
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Tokens a second of each contender; in each repeat they take turns with new prompts."""
    sampling = _sampling(workload, config)

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        prompts = _prompts(workload, config, repeat + 1)
        for name, contender in contenders.items():
            contender.prepare()
            torch.manual_seed(repeat)

            began = clock()
            responses = contender.generate(
                prompts, replace(sampling, seed=repeat), workload["samples"]
            )
            seconds = clock() - began

            lengths = [len(tokens) for tokens in responses]
            assert len(lengths) == workload["prompts"] * workload["samples"], name
            _check(name, lengths, workload)
            runs[name].append(_summary(lengths, seconds, workload, config, limits))

    medians = {name: _median(own) for name, own in runs.items()}
    return {**workload, "contenders": medians}


def _check(name: str, lengths: list[int], workload: Mapping[str, Any]) -> None:
    """Stop if a contender did not do the work that the workload asks for."""
    longest = workload["max_tokens"]
    spread = max(lengths) / min(lengths)
    if workload["mean_tokens"] is None and set(lengths) != {longest}:
        raise SystemExit(f"{name} stopped early: {min(lengths)} of {longest} tokens")
    if workload["mean_tokens"] is not None and spread < 10:
        raise SystemExit(
            f"{name}: response lengths from {min(lengths)} to {max(lengths)} do not spread tenfold"
        )


def _summary(
    lengths: list[int],
    seconds: float,
    workload: Mapping[str, Any],
    config: PreTrainedConfig,
    limits: Mapping[str, float],
) -> dict[str, Any]:
    itemsize = DTYPES[str(config.dtype).removeprefix("torch.")].itemsize
    operations, read = work(
        config, workload["prompt_length"], lengths, itemsize, workload["samples"]
    )
    return {
        "tokens": sum(lengths),
        "seconds": seconds,
        "tokens_per_second": sum(lengths) / seconds,
        "gemm_share": operations / limits["gemm_flops"] / seconds,
        "memory_share": read / limits["read_bandwidth"] / seconds,
        "shortest": min(lengths),
        "longest": max(lengths),
    }


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of median speed, and the speeds of all runs."""
    speeds = [run["tokens_per_second"] for run in runs]
    middle = sorted(runs, key=lambda run: run["tokens_per_second"])[len(runs) // 2]
    return {**middle, "tokens_per_second": statistics.median(speeds), "all": speeds}


if __name__ == "__main__":
    main()
