"""The steps of the first hour on a GPU: which processes run, and where they write what they find.

This file starts nothing, and judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = ("step", "timing_s/", "perf/", "reshard/", "rollout/", "rollout_corr/k3_kl", "actor/grad")
LONG_RUN = 50  # steps in which memory must not grow


@dataclass(frozen=True)
class Step:
    """One process of the hour."""

    name: str
    command: list[str]  # after the interpreter
    output: Path  # JSON, or a run's metrics as JSON lines
    goes_on: int = 0  # the output has so many steps of an earlier run, which this one continues

    def found(self) -> Any:
        """What the process has written so far; None if it has written nothing."""
        if not self.output.is_file():
            return None
        text = self.output.read_text(encoding="utf-8")
        if self.output.suffix != ".jsonl":
            return json.loads(text)
        rows = [json.loads(line) for line in text.splitlines()]
        return [
            {name: value for name, value in row.items() if name.startswith(KEPT)}
            for row in rows
            if row["step"] > self.goes_on
        ]


@dataclass(frozen=True)
class Sizes:
    """The models of an hour; the names are those of `model_sizes.QWEN3`."""

    small: str
    large: str
    largest: str
    steps: tuple[int, int]  # of a run of the small model and of the large one


FULL = Sizes("0.25B", "0.6B", "1.7B", (LONG_RUN, 4))
TINY = Sizes("tiny", "tiny", "tiny", (6, 2))


def steps_of(sizes: Sizes, out: Path, gpus: int) -> list[Step]:
    """The steps, those that tell most first; `out` is an absolute path."""
    many, few = sizes.steps
    saves = f"trainer.save_freq={few}"
    models = sorted({sizes.small, sizes.large})
    inputs = ["benchmarks/gpu_hour_inputs.py", *models, "--out", str(out / "inputs")]
    speed, another = (
        _written(f"speed-{size}", out, "benchmarks/gpu.py", "--size", size, "--strict")
        for size in (sizes.large, sizes.largest)
    )
    steps = [
        _written("facts", out, "benchmarks/gpu_hour_facts.py"),
        _written("checks", out, "-m", "tests.gpu", *([] if gpus else ["--device", "cpu"])),
        _written("inputs", out, *inputs),
        _ppo("ppo-large", sizes.large, out, f"trainer.total_steps={few}", saves),
        _decode(["native", "transformers"], sizes.large, out),
    ]
    if gpus:  # a trial does without vLLM, whose start on a CPU takes a minute
        steps.append(_decode(["vllm"], sizes.large, out))
    paged = ("benchmarks/gpu_paged.py", "--size", sizes.large)
    steps += [speed, _written("paged", out, *paged), _profile(sizes.large, out)]
    steps.append(_ppo("ppo-small", sizes.small, out, f"trainer.total_steps={many}"))
    steps.append(_resumed(sizes.large, out, few))
    if gpus > 1:
        steps.append(_written("hand-over", out, "benchmarks/reshard.py", "--sizes", "110M"))
    return [*steps, another] if another != speed else steps


def _written(name: str, out: Path, *command: str) -> Step:
    file = out / "steps" / f"{name}.json"
    return Step(name, [*command, "--json", str(file)], file)


def _ppo(name: str, size: str, out: Path, *keys: str) -> Step:
    run = out / "runs" / name
    command = _train("launch/train_ppo.py", size, out, run, "trainer.overwrite=true", *keys)
    return Step(name, command, run / "metrics.jsonl")


def _resumed(size: str, out: Path, done: int) -> Step:
    """The run before goes on from its checkpoint, and saves the next ones while it trains."""
    keys = (f"trainer.total_steps={done + 2}", "trainer.save_freq=1", "trainer.async_save=true")
    run = out / "runs" / "ppo-large"
    command = _train("launch/train_ppo.py", size, out, run, *keys)
    return Step("ppo-resumed", command, run / "metrics.jsonl", goes_on=done)


def _profile(size: str, out: Path) -> Step:
    """Its responses are short, since the profiler keeps every kernel."""
    file = out / "steps" / "profile.json"
    run = out / "runs" / "profile"
    keys = ["trainer.total_steps=3", "trainer.overwrite=true", "data.train_batch_size=8"]
    keys += ["actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8"]
    keys += [] if size == "tiny" else ["data.max_response_length=64"]
    program = "benchmarks/gpu_hour_profile.py"
    return Step("profile", _train(program, size, out, run, "--json", str(file), *keys), file)


def _train(program: str, size: str, out: Path, run: Path, *arguments: str) -> list[str]:
    return [
        *("launch/torchrun.py", "--standalone", "--nproc-per-node=1", program),
        *("--config", str(out / "inputs" / size / "ppo.yaml")),
        *(f"trainer.output_dir={run}", *arguments),
    ]


def _decode(contenders: Sequence[str], size: str, out: Path) -> Step:
    """Tokens a second; vLLM has a process of its own, since it may take the process down."""
    name = f"decode-{contenders[0]}"
    file = out / "steps" / f"{name}.json"
    length = 8 if size == "tiny" else 256
    case = {
        "size": size,
        "dtype": "bfloat16",
        "threads": 1,
        "contenders": contenders,
        "repeats": 3,
        "clock": "wall",
        "workloads": [
            {
                "name": f"{count} x {length}",
                "prompts": count,
                "samples": 1,
                "prompt_length": length,
                "max_tokens": length,
                "mean_tokens": None,
            }
            for count in (1, 16, 64, 256)
        ],
    }
    return Step(name, ["benchmarks/generation_case.py", json.dumps(case), str(file)], file)
