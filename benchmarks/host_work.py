"""Measures the host work of a PPO step: all that is neither in a model nor in an engine.

    torchrun --standalone benchmarks/host_work.py [--samples 16384] [--json FILE]

One process makes whole steps of PPO, with actor, critic, reference and reward model of one tiny
layer, the output layer: the blocks before it are left out. The engine's place is taken by one that
has its responses ready, since what a step costs apart from the models does not depend on what they
say. The seconds of the step are split by what the process does:

    model     forward and backward passes, the exchange of gradients and the optimizer
    losses    log-probs, values and losses of each micro-batch, from the output of the model
    host      everything else, by the phase of the step

"losses" holds tensor work that a GPU would do, and work of the host for each pack: gathering its
rows, spreading its results and counting. No clock parts the two, so the host's work is reported
without "losses", which is too little, and with "losses", which is too much.

A second of a part that another part is nested in counts once, for the inner one. All are seconds
that the process had a core, so other processes of the machine do not count. `--profile` says in
which functions the time of one more step goes.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import pstats
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from train_step_case import FIRST_WORD, Case, write_case

from mrlhf.config import PPOConfig, load_config
from mrlhf.device import pick_device
from mrlhf.inference.base import EngineStats, Finished, Request, Sample
from mrlhf.inputs import read_ppo_inputs
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import init_distributed
from mrlhf.parallel.phases import Phases
from mrlhf.parallel.schedule import Pipeline
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo import work
from mrlhf.trainers.ppo.setup import assemble
from mrlhf.trainers.ppo.step import PPOTrainer
from mrlhf.training.optimizer import ShardedOptimizer

SIZE = "one layer"
SAMPLES_OF_A_PROMPT = 8
PROMPT_TOKENS = 200
MINI_BATCHES = 4
NOT_HOST = ("engine", "model")


def main() -> None:
    """Measure, and write the table and the JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt with its response")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    device = pick_device("cpu", 0)
    init_distributed(device, 600.0)
    with tempfile.TemporaryDirectory() as directory:
        trainer = _trainer(Path(directory), arguments.samples, arguments.tokens)
        steps = [_measured_step(trainer, number + 1) for number in range(arguments.steps)]
        if arguments.profile:
            _profile(trainer, arguments.steps + 1)
    dist.destroy_process_group()

    phases = {
        phase: statistics.median(step.get(phase, 0.0) for step in steps) for phase in steps[-1]
    }
    with_losses = sum(seconds for phase, seconds in phases.items() if phase not in NOT_HOST)
    host = {"host": with_losses - phases["losses"], "host with losses": with_losses}
    in_order = sorted(phases.items(), key=lambda item: -item[1])
    for name, seconds in [*in_order, *host.items()]:
        print(f"{name:18s} {seconds:8.2f} s")
    if arguments.json is not None:
        numbers = {"samples": arguments.samples, "tokens": arguments.tokens, **host}
        arguments.json.write_text(json.dumps({**numbers, "phases": phases}) + "\n")


class _Clock:
    """Seconds by part; an inner part's seconds are not the outer one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = ["metrics"]
        self._since = time.process_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of the body for `name`."""
        self._change()
        self._inside.append(name)
        try:
            yield
        finally:
            self._change()
            self._inside.pop()

    def wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, whose seconds count for `name`."""

        @functools.wraps(function)
        def counted(*values: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*values, **named)

        return counted

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        self._change()
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds

    def _change(self) -> None:
        now = time.process_time()
        name = self._inside[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


CLOCK = _Clock()


def _count_seconds() -> None:
    """Have the parts of the trainer counted."""

    enter = Phases.enter

    @contextmanager
    def counted(self: Phases, phase: str) -> Iterator[None]:
        with enter(self, phase), CLOCK.part("rest of step" if phase == "step" else phase):
            yield

    Phases.enter = counted  # type: ignore[method-assign]
    for name in ("forward", "forward_backward"):
        passes = getattr(Pipeline, name)

        def with_callback(
            self: Any, packs: Any, function: Any, *others: Any, passes: Any = passes
        ) -> Any:
            return passes(self, packs, CLOCK.wrap(function, "losses"), *others)

        setattr(Pipeline, name, CLOCK.wrap(with_callback, "model"))
    ShardedOptimizer.step = CLOCK.wrap(ShardedOptimizer.step, "model")  # type: ignore[method-assign]
    work.Work.cut = CLOCK.wrap(work.Work.cut, "cut")  # type: ignore[method-assign]
    work.correction_metrics = CLOCK.wrap(work.correction_metrics, "correction metrics")


def _measured_step(trainer: PPOTrainer, number: int) -> dict[str, float]:
    CLOCK.take()
    trainer.step(_begun(trainer, number))
    return CLOCK.take()


def _begun(trainer: PPOTrainer, number: int) -> Any:
    progress = trainer.begin_step(number)
    engine: Any = trainer.parts.generator.engine
    engine.prepare()
    CLOCK.take()
    return progress


def _profile(trainer: PPOTrainer, number: int) -> None:
    progress = _begun(trainer, number)
    profile = cProfile.Profile()
    profile.runcall(trainer.step, progress)
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


class _ReadyEngine:
    """Has its responses ready; everything else of an engine costs it nothing."""

    version = 0

    def __init__(self, samples: int, response_tokens: int) -> None:
        self._length = response_tokens
        self._requests: Sequence[Request] = ()
        self._samples: list[tuple[array[int], array[float]]] = []
        self._count = samples

    def prepare(self) -> None:
        """Make the responses of a step."""
        for _ in range(self._count):
            tokens = torch.randint(FIRST_WORD, 32, (self._length,))
            self._samples.append(
                (array("i", tokens.tolist()), array("f", (tokens * -0.1).tolist()))
            )

    @property
    def in_flight(self) -> int:
        """The samples that were asked for."""
        return sum(len(request.samples) for request in self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests."""
        self._requests = requests

    def step(self) -> None:
        """Do nothing."""

    def collect(self) -> Finished:
        """Hand over a response to each request."""
        with CLOCK.part("engine"):
            samples = []
            for request in self._requests:
                for index in request.samples:
                    tokens, logprobs = self._samples.pop()
                    sample = Sample(request.id, index, tokens, logprobs, False, self.version)
                    samples.append(sample)
            self._requests = ()
            return Finished(samples, EngineStats(steps=1))

    def commit(self, version: int) -> None:
        """Take note of the version of the weights."""
        self.version = version

    def sleep(self, free_weights: bool = False) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def take_cache(self) -> None:
        """Do nothing."""


def _trainer(directory: Path, samples: int, tokens: int) -> PPOTrainer:
    """A trainer whose engine has its responses ready."""
    draw = random.Random(2)
    prompts = [
        draw.choices(range(FIRST_WORD, 32), k=PROMPT_TOKENS)
        for _ in range(samples // SAMPLES_OF_A_PROMPT)
    ]
    response_tokens = tokens - PROMPT_TOKENS
    case = Case(SIZE, "float32", "equal", prompts, [response_tokens] * len(prompts))
    write_case(case, directory, batches=1)

    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(_config(directory, case)))
    config = load_config(PPOConfig, file, [])
    run = Run(pick_device("cpu", 0), 0, 1, GroupFactory(600.0), directory)
    parts = assemble(config, read_ppo_inputs(config), run)

    parts.generator.engine = _ReadyEngine(samples, response_tokens)  # type: ignore[assignment]
    for role in (parts.actor, parts.critic, parts.reference, parts.scorer._model):
        assert role is not None
        _keep_one_layer(role.engine.chunks)
    _count_seconds()
    return PPOTrainer(config, run, parts)


def _keep_one_layer(chunks: Sequence[Any]) -> None:
    """Leave out all layers of the model but the embedding and the output layer."""
    for chunk in chunks:
        for module in chunk.modules():
            if type(module).__name__ == "TransformerBlock":
                module.forward = _unchanged


def _unchanged(hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return hidden_states


def _config(directory: Path, case: Case) -> dict[str, Any]:
    prompts = len(case.prompts)
    trained = {"ppo_mini_batch_size": prompts // MINI_BATCHES, "optim": {"lr": 1e-6}}
    return {
        "actor": {"path": str(directory / "policy"), **trained},
        "critic": {"path": str(directory / "critic"), **trained},
        "reference": {"path": str(directory / "policy")},
        "reward_model": {"path": str(directory / "reward")},
        "reward": {"terms": [{"name": "reward_model"}]},
        "rollout": {"n": SAMPLES_OF_A_PROMPT, "kv_cache_mb": 64},
        "data": {
            "train_files": str(directory / "train.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "train_batch_size": prompts,
            "max_prompt_length": PROMPT_TOKENS,
            "max_response_length": case.response_lengths[0],
        },
        "algorithm": {"use_kl_in_reward": True},
        "trainer": {"total_steps": 1000, "output_dir": str(directory / "run"), "log_samples": 0},
    }


if __name__ == "__main__":
    main()
