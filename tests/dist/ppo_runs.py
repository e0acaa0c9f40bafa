"""Runs whole PPO steps in four ranks, from configuration to updated weights, for several tests.

A test module states each run as a constant of type `Scenario`, beside the test of it. The fixture
`runs` in `conftest.py` runs all scenarios of a module, in one start of ranks. Every call into the
trainer stands in this file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from mrlhf.batch import Experience
from mrlhf.config import PPOConfig, load_config
from mrlhf.data.sample_table import SampleTable, read_samples
from mrlhf.errors import ConfigError, RewardError, TrainingError
from mrlhf.inputs import read_ppo_inputs
from mrlhf.parallel.groups import GroupFactory
from mrlhf.preflight import check, check_models
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.resume import Updating
from mrlhf.trainers.ppo.setup import assemble
from mrlhf.trainers.ppo.step import PPOTrainer
from tests.dist.role_runs import CPU, fingerprint
from tests.metric_rows import without_row
from tests.oracle import plain_models, plain_optimizer, plain_tables
from tests.ranks import run_ranks
from tests.tiny_task import data_keys, write_tiny_task

WORLD_SIZE = 4
MODEL = "llama"
REWARD_MODEL = "qwen2-tied-critic"
WIDE_TEACHER = "llama-wide"
SOURCES = ("sums", "others")
"""The data sources of the rows of `data/mixed.jsonl`, two thirds and one third of them."""
REWARD_WEIGHT = 0.5
KL_COEF = 0.2
TARGET_KL = 1e-4
HORIZON = 100

_COMPARED = (
    "scores",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "token_rewards",
    "advantages",
    "returns",
)

# Overrides that must not change a number.
TP2_PP2 = ["actor.tp=2", "actor.pp=2"]
DP4 = ["critic.pp=2", "critic.micro_batch_tokens=16", "reward_model.tp=4"]

# In an override, "ROOT" becomes the folder of the models, and "CUSTOM" the path of the file of a
# user's reward functions.
REWARD_FUNCTIONS = """
import time


def slow_letters(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.02)
    return letters(data_source, solution_str, ground_truth, extra_info)


def letters(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 10, "digits": sum(c.isdigit() for c in solution_str)}


def places(data_source, solution_str, ground_truth, extra_info):
    values = [(i, 0.1 * (1 + i)) for i, c in enumerate(solution_str) if c in "02468+="]
    last = extra_info["response_tokens"] - 1
    tokens = [(0, -0.25), (last, 0.5)]
    return {"score": 0.5, "character_positions": values, "token_positions": tokens}


def breaks(data_source, solution_str, ground_truth, extra_info):
    raise ZeroDivisionError("no such number")
"""

# Rollout functions and an environment, in ROOT/episodes.py.
EPISODES = """
import asyncio


class Asks:
    def reset(self, row):
        self.turns = 0

    def reply(self, text):
        self.turns += 1
        return f"{self.turns}+" if self.turns < 3 else None

    def reward(self):
        return self.turns


async def own(engine, row, sampling):
    asked = await engine.prompt(row["prompt"])
    first, second = await asyncio.gather(engine.generate(asked, 3), engine.generate(asked, 2))
    again = await engine.generate(await engine.tell(first, "3+4="))
    other = await engine.generate(await engine.encode("1+" + row["answer"]))
    for one in (again, second, other):
        one.reward = sum(one.token_ids) / 100
        one.role = "asks" if one is other else "answers"
    return [again, second, other]


async def shared(engine, row, sampling):
    first = await engine.generate(await engine.prompt(row["prompt"]), 3)
    ends = [await engine.generate(await engine.tell(first, text), 3) for text in ("1+", "2+")]
    ends[0].reward = {"score": len(ends[0].text + ends[1].text) / 10, "turns": 3}
    return ends
"""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
FORGETFUL_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('-')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}",
)
"""Of all turns but the last it writes only what stands behind a -, as others do with thoughts."""


@dataclass(frozen=True)
class Scenario:
    """A run of two steps: its name, and its overrides of the base configuration."""

    name: str
    overrides: Sequence[str] = field(default_factory=list)
    # Puts a fault into a rank, whose number it is given.
    fault: Callable[[pytest.MonkeyPatch, int], None] | None = None


@dataclass(frozen=True)
class Step:
    """What one rank saw of one step, and whether the step changed the weights of the roles."""

    metrics: dict[str, float]
    experience: Experience
    actor_moved: bool
    critic_moved: bool

    @property
    def responses(self) -> list[list[int]]:
        """The tokens of each response."""
        rollout = self.experience.rollout
        rows = zip(rollout.response_ids.tolist(), rollout.response_lengths, strict=True)
        return [ids[:length] for ids, length in rows]

    @property
    def comparable_metrics(self) -> dict[str, float]:
        """The metrics that no layout may change."""
        free = ("timing", "perf/", "train/", "reshard/", "rollout/")
        return {name: value for name, value in self.metrics.items() if not name.startswith(free)}


@dataclass(frozen=True)
class Runs:
    """The runs of a module's scenarios."""

    root: Path  # holds the models, the user's reward functions, and `runs/<scenario>`
    scenarios: list[Scenario]  # in the order in which they ran
    # For each rank, by the scenario's name: its steps, or the error that ended it.
    of_ranks: list[dict[str, list[Step] | str]]

    def steps(self, scenario: Scenario, rank: int = 0) -> list[Step]:
        """The two steps, as a rank saw them."""
        steps = self.of_ranks[rank][scenario.name]
        assert isinstance(steps, list), steps
        return steps

    def error(self, scenario: Scenario, rank: int) -> str:
        """The message of the error that ended the run on a rank."""
        error = self.of_ranks[rank][scenario.name]
        assert isinstance(error, str), "the run has ended without an error"
        return error

    def output(self, scenario: Scenario) -> Path:
        """The output directory of the run."""
        return self.root / "runs" / scenario.name

    def dumped(self, scenario: Scenario, number: int) -> list[dict[str, Any]]:
        """The samples that step `number`, from 1, wrote down."""
        file = self.output(scenario) / "rollouts" / f"step_{number:06d}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    def table(self, scenario: Scenario, number: int) -> SampleTable:
        """The samples that step `number` wrote down with the numbers of their tokens."""
        return read_samples(self.output(scenario) / "rollouts" / f"step_{number:06d}.parquet")

    def load(self, suffix: str = "") -> Any:
        """The policy as transformers' model, or what its `suffix` names: "-ref" or "-critic"."""
        return plain_models.load(self.root / f"{MODEL}{suffix}")

    def rewards(self, sequences: Iterable[Tensor], model: str = REWARD_MODEL) -> list[float]:
        """What a reward model gives each sequence, weighted."""
        judge = plain_models.load(self.root / model)
        rewards = []
        for sequence in sequences:
            with torch.no_grad():
                scores = judge.score(judge.model(sequence[None])[0])
            rewards.append(scores[0, -1].item() * REWARD_WEIGHT)
        return rewards


def run_scenarios(root: Path, scenarios: list[Scenario]) -> Runs:
    """Write models, data, a user's reward functions and the base configuration to `root`; run."""
    plain_models.save_models(root)
    write_tiny_task(root / "data", train=20)
    for part in (root / f"{MODEL}-ref", root / "data" / "tokenizer"):
        shutil.copytree(part, root / "judge", dirs_exist_ok=True)
    plain_models.save_wide(root / WIDE_TEACHER)
    rows = (root / "data" / "train.jsonl").read_text().splitlines()
    mixed = [json.loads(row) | {"data_source": SOURCES[n % 3 == 0]} for n, row in enumerate(rows)]
    for row in mixed:
        row["response"] = ["1+" + row["answer"][:1], "-12"]
    (root / "data" / "mixed.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    (root / "rewards.py").write_text(REWARD_FUNCTIONS)
    (root / "episodes.py").write_text(EPISODES)
    (root / "chat.jinja").write_text(CHAT_TEMPLATE)
    (root / "forgets.jinja").write_text(FORGETFUL_TEMPLATE)
    (root / "base.yaml").write_text(yaml.safe_dump(_base(root)))

    run_ranks(WORLD_SIZE, _in_ranks, str(root), scenarios)
    files = [_result_file(root, rank) for rank in range(WORLD_SIZE)]
    return Runs(root, scenarios, [torch.load(file, weights_only=False) for file in files])


def assert_same_on_every_layout(runs: Runs, *scenarios: Scenario) -> None:
    """The scenarios, which differ in their layouts alone, have the same steps up to rounding."""
    first, *others = scenarios
    for scenario in others:
        pairs = zip(runs.steps(scenario), runs.steps(first), strict=True)
        for number, (step, wanted) in enumerate(pairs, start=1):
            title = f"{scenario.name}, step {number}"
            assert step.responses == wanted.responses, title
            _assert_same_experience(step.experience, wanted.experience, title)
            assert step.comparable_metrics == pytest.approx(
                wanted.comparable_metrics, rel=1e-4, abs=2e-5
            ), title


def assert_engine_and_trainer_agree(runs: Runs, without: Sequence[Scenario] = ()) -> None:
    """In all scenarios of the module: the rollout has the newest weights and their log-probs."""
    for scenario in runs.scenarios:
        failed = isinstance(runs.of_ranks[0][scenario.name], str)
        if failed or scenario in without:
            continue
        for number, step in enumerate(runs.steps(scenario)):
            title = f"{scenario.name}, step {number + 1}"
            assert step.metrics["training/rollout_probs_diff_max"] < 1e-5, title
            rollout = step.experience.rollout
            assert (rollout.versions[rollout.loss_mask] == number).all(), title


def assert_experience_by_hand(step: Step, terminal: bool) -> None:
    """The KL is taken off each token's reward, or all of it off the last token's if `terminal`."""
    experience = step.experience
    kl = (experience.old_logprobs - experience.ref_logprobs).double()
    rewards = torch.zeros_like(kl)
    returns = torch.zeros_like(kl)
    for row, length in enumerate(experience.rollout.response_lengths):
        if terminal:
            rewards[row, length - 1] = -KL_COEF * kl[row, :length].sum()
        else:
            rewards[row, :length] = -KL_COEF * kl[row, :length]
        rewards[row, length - 1] += experience.scores[row]
        for t in range(length):  # gamma = lambda = 1: all the reward to come
            returns[row, t] = rewards[row, t:length].sum()

    mask = experience.rollout.response_mask
    advantages = (returns - experience.values)[mask]
    assert_close(experience.token_rewards, rewards)
    assert_close(experience.returns, returns)
    assert_close(experience.advantages[mask], (advantages - advantages.mean()) / advantages.std())
    assert not experience.advantages[~mask].any()


def assert_close(value: Tensor, wanted: Tensor) -> None:
    """Equal up to the rounding of the models."""
    torch.testing.assert_close(value.double(), wanted.double(), rtol=0, atol=2e-5)


def _assert_same_experience(experience: Experience, wanted: Experience, title: str) -> None:
    for name in _COMPARED:
        value = getattr(experience, name)
        expected = getattr(wanted, name)
        if expected is None:
            assert value is None, f"{title}: {name}"
        else:
            assert torch.allclose(value, expected, rtol=0, atol=1e-4), f"{title}: {name}"


def _base(root: Path) -> dict[str, Any]:
    trained = {
        "ppo_mini_batch_size": 4,
        "ppo_epochs": 2,
        "optim": {"lr": 1e-3, "adam_eps": plain_optimizer.EPS},
    }
    terms = [{"name": "exact_match"}, {"name": "reward_model", "weight": REWARD_WEIGHT}]
    kl_ctrl = {
        "type": "adaptive",
        "kl_coef": KL_COEF,
        "target_kl": TARGET_KL,
        "horizon": HORIZON,
    }

    return {
        "seed": 3,
        "actor": {"path": str(root / MODEL), "use_kl_loss": True, "kl_loss_coef": 0.1, **trained},
        "critic": {"path": str(root / f"{MODEL}-critic"), **trained},
        "reference": {"path": str(root / f"{MODEL}-ref")},
        "reward_model": {"path": str(root / REWARD_MODEL)},
        "reward": {"terms": terms},
        "rollout": {
            "n": 2,
            "temperature": plain_tables.TEMPERATURE,
            "dump_freq": 1,
            "dump_format": "jsonl",
        },
        "data": data_keys(root, max_response_length=5),
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": kl_ctrl},
        "trainer": {"total_steps": 2, "output_dir": str(root / "runs")},
    }


def _in_ranks(rank: int, world_size: int, root: str, scenarios: list[Scenario]) -> None:
    factory = GroupFactory(timeout_s=600.0)
    results: dict[str, list[Step] | str] = {}
    for scenario in scenarios:
        with pytest.MonkeyPatch.context() as patch:
            if scenario.fault is not None:
                scenario.fault(patch, rank)
            try:
                results[scenario.name] = _steps(Path(root), scenario, rank, factory)
            except (ConfigError, RewardError, TrainingError) as error:
                results[scenario.name] = str(error)
    torch.save(results, _result_file(Path(root), rank))


def _result_file(root: Path, rank: int) -> Path:
    return root / f"rank{rank}.pt"


def _steps(root: Path, scenario: Scenario, rank: int, factory: GroupFactory) -> list[Step]:
    functions = str(root / "rewards.py")
    overrides = [
        override.replace("CUSTOM", functions).replace("ROOT", str(root))
        for override in scenario.overrides
    ]
    config = load_config(PPOConfig, root / "base.yaml", overrides)
    check(config, WORLD_SIZE)
    assert None not in check_models(config).values()  # every model was there to be checked

    directory = root / "runs" / scenario.name
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(CPU, rank, WORLD_SIZE, factory, directory)
    trainer = PPOTrainer(config, run, assemble(config, read_ppo_inputs(config), run))
    parts = trainer.parts

    steps = []
    try:
        for number in (1, 2):
            actor_before = fingerprint(parts.actor)
            critic_before = fingerprint(parts.critic)
            metrics = trainer.step(trainer.begin_step(number))
            assert isinstance(trainer.state, Updating)
            assert without_row(metrics) == []
            steps.append(
                Step(
                    metrics,
                    trainer.state.experience,
                    actor_moved=fingerprint(parts.actor) != actor_before,
                    critic_moved=fingerprint(parts.critic) != critic_before,
                )
            )
    finally:
        parts.scorer.close()
    return steps
