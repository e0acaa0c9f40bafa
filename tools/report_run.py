"""Writes the directory of a made-up PPO run, to measure and to test the report with.

The numbers follow smooth curves with noise, and the responses are words of a small vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from mrlhf.batch import NO_VERSION
from mrlhf.data.sample_table import SampleTable, write_samples

PHASES = {"reshard": 0.2, "gen": 3.0, "reward": 0.3, "old_log_prob": 0.8, "update_actor": 2.5}
WORDS = ("the", "sum", "of", "is", "so", "we", "add", "carry", "then", "gives", "12", "7", "=", "+")
PROMPTS = 40
ALARM = {
    "step": 3,
    "name": "clip_fraction",
    "severity": "warning",
    "message": "0.62 of the tokens are clipped",
    "cause": "a learning rate that is too high",
    "key": "actor.optim.lr",
    "link": "docs/operations.md#clip_fraction",
}


@dataclass(frozen=True)
class RunSize:
    """How large a made-up run is."""

    steps: int  # of the run, all of them with a rollout
    samples: int  # of each rollout, two of each prompt
    tokens: int  # of the longest response
    ranks: int  # of the job
    has_episodes: bool = False  # whether each response has two turns


def write_run(
    directory: Path,
    size: RunSize,
    *,
    learning_rate: float = 1e-5,
    seed: int = 1,
    first_response: str | None = None,
) -> None:
    """Write metrics, configuration, an alarm, timeline and rollouts of a run.

    Args:
        directory: is made.
        size: of the run.
        learning_rate: appears in the configuration, and sets how fast the reward rises.
        seed: of all noise.
        first_response: the text of the first token of each step's first response, and of its
            prompt.
    """
    noise = np.random.default_rng(seed)
    (directory / "rollouts").mkdir(parents=True)
    (directory / "timeline").mkdir()
    config = {
        "seed": seed,
        "actor": {
            "path": "models/policy",
            "optim": {"lr": learning_rate},
            "policy_loss": {"loss_mode": "vanilla"},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"output_dir": str(directory), "total_steps": size.steps},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    rewards = [_reward(step, size.steps, learning_rate) for step in range(size.steps + 1)]
    rows = [_metrics(step, rewards[step], noise) for step in range(size.steps + 1)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (directory / "summary.json").write_text(
        json.dumps({"steps": size.steps, "held_out_prompts": 400}), encoding="utf-8"
    )
    status = {"began": 1.7e9, "updated": 1.7e9 + 180, "host": "node-1", "ranks": size.ranks}
    (directory / "status.json").write_text(json.dumps(status), encoding="utf-8")
    started = {"command": "launch/train_ppo.py --config my.yaml", "code": "0.8.0 (0123abc)"}
    (directory / "run.json").write_text(json.dumps(started), encoding="utf-8")
    (directory / "alarms.jsonl").write_text(json.dumps(ALARM) + "\n", encoding="utf-8")

    for rank in range(size.ranks):
        _write_timeline(directory / "timeline" / f"rank_{rank}.jsonl", rank, size, noise)
    for step in range(1, size.steps + 1):
        table = _samples(step, rewards[step], size, noise, first_response)
        write_samples(directory / "rollouts" / f"step_{step:06d}.parquet", table)


def _reward(step: int, steps: int, learning_rate: float) -> float:
    return 1 - math.exp(-3 * step / steps * learning_rate / 1e-5) * 0.8


def _metrics(step: int, reward: float, noise: np.random.Generator) -> dict[str, Any]:
    """A row of metrics.jsonl with the names of a PPO run; step 0 has a validation alone."""
    row: dict[str, Any] = {"step": step}
    if step % 10 == 0:
        row["val/task/acc@1"] = reward * 0.9
        row["val_sampled/task/acc@1"] = reward * 0.8
    if step == 0:
        return row

    jitter = noise.normal(0, 0.03, 200)
    row |= {
        "critic/score/mean": reward + jitter[0],
        "actor/reward_kl_penalty": 0.02 * step**0.5 + 0.1 * jitter[1],
        "actor/ppo_kl": abs(0.1 * jitter[2]),
        "actor/entropy": 2 - reward + jitter[3],
        "actor/pg_clipfrac": abs(jitter[4]),
        "actor/grad_norm": 1 + jitter[5],
        "response_length/mean": 100 + 50 * reward + 50 * jitter[6],
        "response_length/clip_ratio": abs(jitter[7]),
        "training/rollout_probs_diff_max": abs(0.01 * jitter[8]),
        "training/global_step": step,
        "perf/throughput": 1000 + 1000 * jitter[9],
        "perf/memory_in/gen": 21.5,
        "perf/memory_in/update_actor": 44.0,
        "perf/memory/actor/grads": 16.0,
        "perf/memory/actor/params": 8.0,
    }
    for number in range(80):
        row[f"rollout_corr/measure_{number}"] = jitter[10 + number]
    for phase, seconds in PHASES.items():
        row[f"timing_s/{phase}"] = seconds * (1 + 0.1 * reward)
    row["timing_s/step"] = sum(PHASES.values()) * (1 + 0.1 * reward)
    return row


def _write_timeline(file: Path, rank: int, size: RunSize, noise: np.random.Generator) -> None:
    """The phases of a rank; the last rank waits least, since it is the slowest."""
    process = {
        "rank": rank,
        "host": "node-1",
        "device": "a processor",
        "threads": 1,
        "torch": "2.13.0",
        "ranks": size.ranks,
        "began": 1.7e9,
    }
    lines = [json.dumps({"process": process})]
    slow = rank == size.ranks - 1
    for step in range(1, size.steps + 1):
        begin = 0.0
        spans: list[list[Any]] = []
        for phase, seconds in PHASES.items():
            busy = seconds * (0.95 if slow else 0.6 + 0.05 * float(noise.random()))
            spans.append([phase, round(begin, 4), seconds, round(busy, 4)])
            begin += seconds
        spans.insert(0, ["step", 0.0, round(begin, 4), round(begin / 2, 4)])
        lines.append(json.dumps({"step": step, "begin": 1.7e9 + 10 * step, "spans": spans}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _samples(
    step: int, reward: float, size: RunSize, noise: np.random.Generator, first: str | None
) -> SampleTable:
    """The rollout of a step: two samples of each prompt, the prompts in turn."""
    longest = size.tokens
    lengths = [int(x) for x in noise.integers(max(1, longest // 2), longest + 1, size.samples)]
    responses = [
        [" " + word for word in noise.choice(WORDS, length).tolist()] for length in lengths
    ]
    prompts = [(step * size.samples // 2 + i // 2) % PROMPTS for i in range(size.samples)]
    questions = [f"Question {prompt}: what is {prompt} + 12?" for prompt in prompts]
    if first is not None:
        responses[0][0] = first
        questions[0] += first

    scores = [float(x < reward) for x in noise.random(size.samples)]
    texts: dict[str, list[Any]] = {
        "step": [step] * size.samples,
        "uid": prompts,
        "sample": [i % 2 for i in range(size.samples)],
        "data_source": ["task"] * size.samples,
        "prompt": questions,
        "response": ["".join(tokens) for tokens in responses],
        "ground_truth": [str(prompt + 12) for prompt in prompts],
        "finish_reason": ["length" if n == longest else "stop" for n in lengths],
        "length": lengths,
        "score": scores,
        "terms": [[("exact_match", score)] for score in scores],
        "prompt_ids": [[1, prompt] for prompt in prompts],
        "response_tokens": responses,
    }
    tokens = _tokens(lengths, scores, noise)
    if size.has_episodes:
        texts |= _episodes(lengths)
        texts["finish_reason"][-1] = "failure"
        tokens |= _origins(step, lengths, tokens)
    return SampleTable(texts, tokens)


def _told(length: int) -> range:
    """The tokens that a tool wrote, between the two turns of a response."""
    return range(length // 3, length // 2)


def _episodes(lengths: list[int]) -> dict[str, list[Any]]:
    """What happened in each response; the last one failed within its second turn, in a context of
    its own.
    """
    last = len(lengths) - 1
    turns = [[_told(length).start, length] for length in lengths]
    turns[last].pop()
    return {
        "turn_begins": [[0, _told(length).stop] for length in lengths],
        "turns": turns,
        "turn_rewards": [[0.25] for _ in lengths],
        "tools": [[("search", 2), ("error", 1)] for _ in lengths],
        "errors": [2 * (i == last) for i in range(len(lengths))],
        "failure": ["search ended its process" if i == last else "" for i in range(len(lengths))],
        "waited_s": [0.5] * len(lengths),
        "context_begins": [[]] * last + [[_told(lengths[last]).start]],
        "context_prompts": [[]] * last + [[len(_told(lengths[last]))]],
        "context_roles": [[]] * last + [["asks", "checks"]],
    }


def _origins(
    step: int, lengths: list[int], tokens: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The columns that say who wrote each token: the second turn has the newer version."""
    versions = np.full(sum(lengths), NO_VERSION, np.int32)
    begin = 0
    for length in lengths[:-1]:  # nothing of the last response trains, since it failed
        told = _told(length)
        versions[begin : begin + told.start] = step - 1
        versions[begin + told.stop : begin + length] = step
        begin += length

    drawn = versions != NO_VERSION
    return {
        "version": versions,
        "loss_mask": drawn & tokens["loss_mask"],
        "rollout_logprob": np.where(drawn, tokens["rollout_logprob"], np.float32(0)),
    }


def _tokens(
    lengths: list[int], scores: list[float], noise: np.random.Generator
) -> dict[str, NDArray[Any]]:
    total = sum(lengths)
    ends = np.cumsum(lengths) - 1
    old = -noise.gamma(0.5, 0.8, total).astype(np.float32)
    rewards = np.zeros(total, np.float32)
    rewards[ends] = scores
    mask = noise.random(total) > 0.02
    return {
        "response_ids": noise.integers(0, 30000, total).astype(np.int32),
        "loss_mask": mask,
        "advantage": np.where(mask, noise.normal(0, 1, total), 0).astype(np.float32),
        "return": np.repeat(np.array(scores, np.float32), lengths),
        "reward": rewards,
        "value": noise.normal(0.5, 0.1, total).astype(np.float32),
        "old_logprob": old,
        "new_logprob": old + noise.normal(0, 0.05, total).astype(np.float32),
        "rollout_logprob": old + noise.normal(0, 1e-4, total).astype(np.float32),
        "ref_logprob": old + noise.normal(0, 0.3, total).astype(np.float32),
        "entropy": noise.gamma(1.0, 0.5, total).astype(np.float32),
    }
