"""What partial rollouts gain, and how old tokens become: a model, and a run that checks it.

    python benchmarks/rollout_lag.py [--spread 20] [--tool 0.2 2 | --one-turn]
    python benchmarks/rollout_lag.py --measure [--steps 8] [--repeats 1]

The model goes from pass to pass of one engine: a pass takes `--pass-s` seconds and `--sample-s` for
each sample, and draws a token of each sample that does not wait for its tool. An episode has from 1
to `--spread` turns, evenly in the logarithm, and each turn ends with a tool. The table has tokens
per second over those of the waiting form, and the age of the tokens that train, in versions. With
`--one-turn` the spread is that of the lengths of single turns.

With `--measure`, PPO runs with a tiny model whose turns end at random and whose environment sleeps;
the two forms take turns. The seconds of a pass are those of a run whose environment does not sleep.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mrlhf.rollout.partial import choose_whole, round_limits

ROOT = Path(__file__).resolve().parents[1]
FORMS = ((1.25, 2), (1.5, 2), (2.0, 2), (2.0, 3), (3.0, 4), (4.0, 6))  # over, max_versions
MEASURED = (2.0, 3)
PROMPTS, SAMPLES = 16, 2  # of a step
TURN_TOKENS = 16  # in the mean
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ENVIRONMENT = """
import random, time

class Sleeps:
    def reset(self, row):
        self.turns = round({spread} ** random.random())

    def reply(self, text):
        time.sleep(random.uniform({low}, {high}))
        self.turns -= 1
        return "go on" if self.turns > 0 else None

    def reward(self):
        return random.random()
"""


@dataclass(frozen=True)
class Load:
    """What is drawn, and what it takes."""

    spread: int  # most turns of an episode
    tool_s: tuple[float, float]  # seconds of a tool, from and to
    pass_s: float
    sample_s: float
    turn_cost: int = 64  # as the key of the configuration
    one_turn: bool = False

    @property
    def most(self) -> int:
        """More than the longest episode draws, with what its turns count for."""
        return self.spread * (3 * TURN_TOKENS + self.turn_cost)


@dataclass
class Sample:
    """An episode of the model."""

    turns: list[int]  # tokens
    tools: list[float]  # seconds
    turn: int = 0
    drawn: int = 0  # of this turn
    versions: list[int] = field(default_factory=list)  # of all tokens
    now: int = 0  # tokens of this step

    @property
    def ended(self) -> bool:
        """Whether all turns are over."""
        return self.turn == len(self.turns)


@dataclass(frozen=True)
class Found:
    """What a run of the model or of the trainer gives."""

    tokens_per_s: float
    age: float  # of a token that trains, in the mean, versions


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--spread", type=int, default=20, help="most turns of an episode")
    parser.add_argument("--one-turn", action="store_true")
    parser.add_argument("--tool", type=float, nargs=2, default=(0.2, 2.0), help="seconds")
    parser.add_argument("--pass-s", type=float, default=0.02)
    parser.add_argument("--sample-s", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="runs; figures are medians")
    arguments = parser.parse_args()
    tool = tuple(arguments.tool)
    if arguments.measure:
        measure(arguments.spread, tool, arguments.steps, arguments.repeats)
        return
    load = Load(arguments.spread, tool, arguments.pass_s, arguments.sample_s)
    if arguments.one_turn:
        load = replace(load, tool_s=(0.0, 0.0), one_turn=True, turn_cost=0)
    print("over  max_versions  tokens/s over waiting  age")
    waiting = modelled(load, 1.0, 2, arguments.steps, arguments.repeats)
    for over, max_versions in FORMS:
        found = modelled(load, over, max_versions, arguments.steps, arguments.repeats)
        ratio = found.tokens_per_s / waiting.tokens_per_s
        print(f"{over:4g}  {max_versions:12}  {ratio:21.2f}  {found.age:.2f}")


def modelled(load: Load, over: float, max_versions: int, steps: int, repeats: int) -> Found:
    """The medians of several runs of the model."""
    found = [run_model(load, over, max_versions, steps, random.Random(s)) for s in range(repeats)]
    return Found(
        statistics.median(one.tokens_per_s for one in found),
        statistics.median(one.age for one in found),
    )


def run_model(load: Load, over: float, max_versions: int, steps: int, rng: random.Random) -> Found:
    """Go through the steps, with the rule by which a run ends a step."""
    groups: list[tuple[int, list[Sample]]] = []
    clock, tokens, last = 0.0, 0, 0
    ages: list[int] = []
    for version in range(steps):
        while len(groups) < over * PROMPTS:
            groups.append((version, [_episode(load, rng) for _ in range(SAMPLES)]))
        every = [sample for _, samples in groups for sample in samples]
        for sample in every:
            sample.now = 0
        limits: Iterator[int] = iter([10**9])
        if over > 1:
            limits = round_limits(load.most, last)
        for last in limits:
            clock, drawn = _draw(load, every, last, clock, version)
            tokens += drawn
            whole = [i for i, (_, group) in enumerate(groups) if all(one.ended for one in group)]
            since = [began for began, _ in groups]
            taken = choose_whole(whole, since, version, PROMPTS, max_versions)
            if taken is not None:
                break
        for number in taken or []:
            ages += [version - one for sample in groups[number][1] for one in sample.versions]
        groups = [group for number, group in enumerate(groups) if number not in set(taken or [])]
    return Found(tokens / clock, statistics.fmean(ages))


def _episode(load: Load, rng: random.Random) -> Sample:
    turns = round(load.spread ** rng.random())
    if load.one_turn:
        return Sample([turns * TURN_TOKENS], [0.0])
    lengths = [math.ceil(rng.expovariate(1 / TURN_TOKENS)) for _ in range(turns)]
    return Sample(lengths, [rng.uniform(*load.tool_s) for _ in lengths])


def _draw(
    load: Load, every: Sequence[Sample], limit: int, clock: float, version: int
) -> tuple[float, int]:
    """Draw all samples to the limit; returns the clock, and how many tokens there were."""
    busy: list[tuple[float, int, Sample]] = []  # tools that run, by their ends
    order = itertools.count()
    active = [sample for sample in every if not sample.ended and sample.now < limit]
    tokens = 0
    while active or busy:
        if not active:
            clock = max(clock, busy[0][0])
        while busy and busy[0][0] <= clock:
            _, _, sample = heapq.heappop(busy)
            sample.turn += 1
            sample.drawn = 0
            if not sample.ended and sample.now < limit:
                active.append(sample)
        clock += (load.pass_s + load.sample_s * len(active)) * bool(active)
        tokens += len(active)
        drawn, active = active, []
        for sample in drawn:
            sample.drawn += 1
            sample.now += 1
            sample.versions.append(version)
            if sample.drawn == sample.turns[sample.turn]:
                sample.now += load.turn_cost
                heapq.heappush(busy, (clock + sample.tools[sample.turn], next(order), sample))
            elif sample.now < limit:
                active.append(sample)
    return clock, tokens


def measure(spread: int, tool: tuple[float, float], steps: int, repeats: int) -> None:
    """Run PPO in both forms, in turn, and compare with the model."""
    over, max_versions = MEASURED
    with tempfile.TemporaryDirectory() as directory:
        config = _write_inputs(Path(directory), spread, tool)
        ratios = []
        for number in range(repeats):
            seed = f"seed={number + 1}"
            waiting, _ = _run(config, steps, [seed])
            keys = [f"rollout.partial.over={over}", f"rollout.partial.max_versions={max_versions}"]
            partly, _ = _run(config, steps, [seed, *keys])
            ratios.append(partly.tokens_per_s / waiting.tokens_per_s)
            print(
                f"seed {number + 1}: waiting {waiting.tokens_per_s:.0f} tokens/s, over {over:g} "
                f"with {max_versions} versions {partly.tokens_per_s:.0f}: {ratios[-1]:.2f} times, "
                f"age {partly.age:.2f}",
                flush=True,
            )
        config = _write_inputs(Path(directory) / "no waits", spread, (0.0, 0.0))
        _, pass_s = _run(config, steps, [])
    load = Load(spread, tool, pass_s, 0.0)
    base = modelled(load, 1.0, 2, steps, 5)
    model = modelled(load, over, max_versions, steps, 5)
    print(
        f"median {statistics.median(ratios):.2f} times; the model says "
        f"{model.tokens_per_s / base.tokens_per_s:.2f} times, age {model.age:.2f}, with "
        f"{1000 * load.pass_s:.1f} ms a pass"
    )


def _write_inputs(root: Path, spread: int, tool: tuple[float, float]) -> Path:
    """The task, and a configuration; the policy has almost random weights."""
    _python("configs/recipes/turns/prepare.py", "--out", str(root))
    shape = json.loads((ROOT / "configs/models/turns_llama/config.json").read_text())
    (root / "shape").mkdir()
    longest = 4 * spread * TURN_TOKENS
    text = json.dumps({**shape, "max_position_embeddings": longest})
    (root / "shape" / "config.json").write_text(text)
    _python(
        *_TORCHRUN,
        "launch/train_sft.py",
        "--config",
        "configs/recipes/turns/sft.yaml",
        f"model.path={root}/shape",
        f"data.train_files={root}/sft.jsonl",
        f"data.tokenizer={root}/tokenizer",
        "trainer.total_steps=1",
        "optim.lr_warmup_steps=0",
        f"trainer.output_dir={root}/sft",
    )
    environment = root / "sleeps.py"
    environment.write_text(ENVIRONMENT.format(spread=spread, low=tool[0], high=tool[1]))
    vocabulary = json.loads((root / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    ends = sorted(vocabulary.values())[-round(len(vocabulary) / TURN_TOKENS) :]
    config: Mapping[str, Any] = {
        "actor": {
            "path": str(root / "sft" / "model"),
            "ppo_mini_batch_size": PROMPTS,
            "optim": {"lr": 1e-5},
        },
        "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
        "reward": {"terms": [{"name": "environment"}]},
        "rollout": {
            "n": SAMPLES,
            "environment": f"{environment}:Sleeps",
            "max_turns": spread,
            "stop_token_ids": ends,
            "tool_workers": 64,
            "tool_parser": "json",
        },
        "data": {
            "train_files": str(root / "train.jsonl"),
            "tokenizer": str(root / "tokenizer"),
            "train_batch_size": PROMPTS,
            "max_prompt_length": 32,
            "max_response_length": longest - 32,
        },
    }
    path = root / "ppo.json"
    path.write_text(json.dumps(config))
    return path


def _run(config: Path, steps: int, keys: Sequence[str]) -> tuple[Found, float]:
    """What the run of a form gives, and the seconds of a pass that draws something."""
    with tempfile.TemporaryDirectory() as out:
        _python(
            *_TORCHRUN,
            "launch/train_ppo.py",
            "--config",
            str(config),
            f"trainer.total_steps={steps}",
            f"trainer.output_dir={out}/run",
            *keys,
        )
        lines = (Path(out) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "timing_s/gen" in row]
    seconds = sum(row["timing_s/gen"] for row in rows)
    tokens = [1000 * row["timing_s/gen"] / row["timing_per_token_ms/gen"] for row in rows]
    ages = [row.get("staleness/mean", 0.0) for row in rows]
    passes = sum(
        count / row["rollout/tokens_per_engine_step"]
        for count, row in zip(tokens, rows, strict=True)
    )
    return Found(sum(tokens) / seconds, statistics.fmean(ages)), seconds / passes


def _python(*command: str) -> None:
    """Run a program of this repository."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


if __name__ == "__main__":
    main()
