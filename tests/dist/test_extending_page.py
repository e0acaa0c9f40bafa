"""docs/extending.md is followed: its loss, estimator and reward train from files of their own.

The updates are the same on every layout, and those of the built-in methods with the same formulas.
All runs share one spawn of ranks, since starting those is what costs time.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.engine_loop import generate, requests_for
from mrlhf.config import PPOConfig, load_config, parse_args
from mrlhf.config.methods import find_method
from mrlhf.errors import EngineError
from mrlhf.inference.base import EngineLimits, EngineStats, InferenceEngine, SamplingParams
from mrlhf.inputs import read_ppo_inputs
from mrlhf.parallel.groups import GroupFactory
from mrlhf.preflight import dry_run
from mrlhf.rewards.custom import load_custom
from mrlhf.rewards.interface import RewardInput, Scored
from mrlhf.rl.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    estimate_advantages,
)
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.setup import assemble
from mrlhf.trainers.ppo.step import PPOTrainer
from tests.dist.role_runs import CPU
from tests.oracle import plain_models, plain_optimizer, plain_tables
from tests.pages import commands_of
from tests.ranks import run_ranks
from tests.tiny_task import data_keys, write_tiny_task

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
NOT_ON_THE_PAGE = {"version"}
WORLD_SIZE = 2
VOCABULARY = 8  # of the page's engine
LOSS = "actor.policy_loss.loss_mode"
ESTIMATOR = "algorithm.adv_estimator"
BUILT_IN = [
    # The page's loss has no dual clip: this one is out of reach.
    f"{LOSS}=vanilla",
    "actor.clip_ratio_c=1.0e9",
    f"{ESTIMATOR}=grpo",
    "algorithm.norm_adv_by_std_in_grpo=false",
]
LAYOUTS = {
    "dp2": [],
    "tp2": ["actor.tp=2", "rollout.tp=2", "actor.micro_batch_tokens=16"],
    "pp2": ["actor.pp=2"],
}


def write_examples(directory: Path) -> dict[str, str]:
    """Write each example of the page to the file that the page calls it by.

    Returns:
        The references in the page's commands, by what they are for, with full paths.
    """
    page = PAGE.read_text(encoding="utf-8")
    references = {
        LOSS: re.search(rf"{LOSS}=(my_\w+\.py:\w+)", page),
        ESTIMATOR: re.search(rf"{ESTIMATOR}=(my_\w+\.py:\w+)", page),
        "reward": re.search(r"reward\.terms=\[\{name: (my_\w+\.py:\w+)\}\]", page),
    }
    blocks = _code_blocks()[: len(references)]

    written = {}
    for (purpose, reference), block in zip(references.items(), blocks, strict=True):
        assert reference is not None
        file, function = reference[1].split(":")
        assert f"def {function}(" in block
        (directory / file).write_text(block, encoding="utf-8")
        written[purpose] = f"{directory / file}:{function}"
    return written


def _code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def _code_block(text: str) -> str:
    """The example that has `text` in it."""
    (block,) = [block for block in _code_blocks() if text in block]
    return block


def _configuration(root: Path, reward: str) -> dict[str, Any]:
    # Why the eps is so large is said where it stands.
    return {
        "seed": 3,
        "actor": {
            "path": str(root / "llama"),
            "ppo_mini_batch_size": 4,
            "ppo_epochs": 2,
            "clip_ratio": 0.02,
            "optim": {"lr": 3e-3, "adam_eps": plain_optimizer.EPS},
        },
        "reward": {"terms": [{"name": reward, "weight": 20.0}]},
        # Responses of different lengths, so that their rewards differ.
        "rollout": {"n": 2, "temperature": plain_tables.TEMPERATURE, "stop": list("12345+")},
        "data": data_keys(root, max_response_length=5),
        "trainer": {"total_steps": 2, "output_dir": str(root / "runs")},
    }


def _runs(references: dict[str, str]) -> dict[str, list[str]]:
    own = [f"{LOSS}={references[LOSS]}", f"{ESTIMATOR}={references[ESTIMATOR]}"]
    runs = {f"own, {layout}": [*own, *overrides] for layout, overrides in LAYOUTS.items()}
    return {**runs, "built in, dp2": [*BUILT_IN, *LAYOUTS["dp2"]]}


def _in_ranks(
    rank: int, world_size: int, root: str, references: dict[str, str]
) -> dict[str, list[dict[str, float]]]:
    """The metrics of both steps of each run; the policy that each ends with is written."""
    factory = GroupFactory(timeout_s=600.0)

    metrics = {}
    for name, overrides in _runs(references).items():
        directory = Path(root) / "runs" / name
        directory.mkdir(parents=True, exist_ok=True)
        config = load_config(PPOConfig, Path(root) / "base.yaml", overrides)
        run = Run(CPU, rank, world_size, factory, directory)
        trainer = PPOTrainer(config, run, assemble(config, read_ppo_inputs(config), run))
        try:
            metrics[name] = [trainer.step(trainer.begin_step(number)) for number in (1, 2)]
            trainer.parts.actor.engine.export(directory / "actor", 10**9)
        finally:
            trainer.parts.scorer.close()
    return metrics


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, the data, and the page's examples under `mine`."""
    directory = tmp_path_factory.mktemp("extending")
    plain_models.save_models(directory)
    write_tiny_task(directory / "data", train=20)
    (directory / "mine").mkdir()
    return directory


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, str]:
    """Where the page's examples stand, outside the package."""
    return write_examples(root / "mine")


@pytest.fixture(scope="module")
def metrics(root: Path, references: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    """The metrics of both steps of each run, the same on every rank."""
    base = _configuration(root, references["reward"])
    (root / "base.yaml").write_text(yaml.safe_dump(base))
    first, second = run_ranks(WORLD_SIZE, _in_ranks, str(root), references)
    for name in first:
        for step, other in zip(first[name], second[name], strict=True):
            assert _comparable(step) == _comparable(other)
    return first


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Without what a layout may change."""
    measured = ("timing", "perf/", "train/", "reshard/", "rollout/")
    return {name: value for name, value in metrics.items() if not name.startswith(measured)}


def _weights(root: Path, name: str) -> dict[str, Tensor]:
    return load_file(root / "runs" / name / "actor" / "model.safetensors")


def test_the_examples_train_something_to_compare(metrics: Any, root: Path) -> None:
    steps = metrics["own, dp2"]
    for name in ("actor/pg_clipfrac", "actor/grad_norm", "actor/ppo_kl", "reward/short_and_right"):
        assert all(abs(step[name]) > 1e-4 for step in steps), (name, steps)
    assert "critic/vf_loss" not in steps[0]
    before = load_file(root / "llama" / "model.safetensors")
    after = _weights(root, "own, dp2")
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in before)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_the_examples_train_the_same_on_every_layout(metrics: Any, root: Path, layout: str) -> None:
    wanted = metrics["own, dp2"]
    for step, expected in zip(metrics[f"own, {layout}"], wanted, strict=True):
        assert "actor/grad_norm" in expected
        assert _comparable(step) == pytest.approx(_comparable(expected), rel=1e-4, abs=2e-5)

    weights = _weights(root, "own, dp2")
    for name, tensor in _weights(root, f"own, {layout}").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=2e-5)


def test_the_examples_train_as_the_built_in_methods_do(metrics: Any, root: Path) -> None:
    # A loss of our own may read whole sequences, so it sums over all tokens of a pack at once.
    for step, expected in zip(metrics["own, dp2"], metrics["built in, dp2"], strict=True):
        built_in = _comparable(expected)
        # Nobody can tell whether an estimator of our own compares the responses to a prompt.
        del built_in["training/equal_groups"]
        assert _comparable(step) == pytest.approx(built_in, rel=1e-5, abs=1e-7)
    weights = _weights(root, "built in, dp2")
    for name, tensor in _weights(root, "own, dp2").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)


def test_the_commands_of_the_page_pass_the_dry_run(
    root: Path, references: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root / "mine")
    commands = commands_of("docs/extending.md")
    assert len(commands) == len(references)
    for command in commands:
        words = shlex.split(command.replace("configs/", f"{ROOT / 'configs'}/"))
        config, *_ = parse_args(PPOConfig, words[2:])
        assert "fits" in dry_run(config, None).text


def test_a_dry_run_finds_the_examples(root: Path, references: dict[str, str]) -> None:
    base = _configuration(root, references["reward"])
    base["actor"]["policy_loss"] = {"loss_mode": references[LOSS]}
    base["algorithm"] = {"adv_estimator": references[ESTIMATOR]}
    text = dry_run(PPOConfig.model_validate(base), WORLD_SIZE).text
    assert f"{LOSS} {references[LOSS]}" in text
    assert f"{ESTIMATOR} {references[ESTIMATOR]}" in text


def test_the_estimator_takes_the_mean_of_a_prompts_answers_off(
    references: dict[str, str],
) -> None:
    estimator = find_method(ESTIMATOR, references[ESTIMATOR], ADVANTAGE_ESTIMATORS)
    batch = AdvantageInputs(
        rewards=torch.tensor([[1.0, 2.0], [7.0, 0.0], [4.0, 9.0]]),
        mask=torch.tensor([[True, True], [True, False], [True, False]]),
        prompt_groups=torch.tensor([5, 5, 1]),
    )
    advantages, returns = estimate_advantages(estimator, batch, AdvantageOptions())
    # Scores 3 and 7 of one prompt, 4 alone.
    assert advantages.tolist() == [[-2.0, -2.0], [2.0, 0.0], [4.0, 0.0]]
    assert returns.tolist() == advantages.tolist()


def test_the_reward_prefers_a_right_and_a_short_answer(references: dict[str, str]) -> None:
    reward = load_custom(references["reward"])
    try:
        right = RewardInput("sums", "3+4=", " 7", "7", {}, 1)
        wrong = RewardInput("sums", "3+4=", "8", "7", {}, 3)
        scored = reward.score([right, wrong])
    finally:
        reward.close()
    assert scored == [
        Scored(1.05, {"acc": 1.0, "shortness": 0.05}),
        Scored(0.025, {"acc": 0.0, "shortness": 0.025}),
    ]


def _my_engine(likeliest: int) -> InferenceEngine:
    """The page's engine, with weights under which `likeliest` is drawn."""
    example: dict[str, Any] = {}
    exec(_code_block("class MyEngine"), example)
    limits = EngineLimits(max_num_seqs=4, max_length=10, max_prefill_tokens=10)
    engine: InferenceEngine = example["MyEngine"](VOCABULARY, limits)

    engine.wake()
    engine.take_cache()
    (slot,) = engine.weight_slots()
    slot.parameter[likeliest] = 1.0
    engine.commit(3)
    return engine


def test_the_engine_answers() -> None:
    engine = _my_engine(likeliest=5)
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=4, seed=0)
    finished = generate(engine, requests_for([[1], [2, 3]], [0, 1], sampling))
    assert [(sample.request_id, sample.sample_index) for sample in finished.samples] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    chance = math.log(math.e / (math.e + VOCABULARY - 1))
    for sample in finished.samples:
        assert sample.token_ids == [5] * 4 and not sample.stopped
        assert sample.logprobs == pytest.approx([chance] * 4) and sample.version == 3
    assert finished.stats == EngineStats(steps=4, prompt_tokens=6, generated_tokens=16)
    assert engine.version == 3

    stopping = replace(sampling, stop_token_ids=(5,))
    (first, _) = generate(engine, requests_for([[1]], [0], stopping)).samples
    assert first.token_ids == [5] and first.stopped
    engine.sleep()


def test_the_engine_takes_late_requests_and_a_cancel() -> None:
    engine = _my_engine(likeliest=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, seed=0)
    early, late = requests_for([[1], [2]], [0, 1], sampling)
    engine.submit([early])
    engine.step()
    engine.step()
    engine.submit([late])
    engine.step()
    with pytest.raises(EngineError, match="2 samples are in flight"):
        engine.commit(4)

    engine.step()
    assert [sample.request_id for sample in engine.collect().samples] == [0]
    assert engine.in_flight == 1
    assert engine.cancel().samples == [] and engine.in_flight == 0
    engine.step()
    assert [sample.request_id for sample in generate(engine, [late]).samples] == [1]


def test_the_engine_refuses_bad_weights_and_requests() -> None:
    engine = _my_engine(likeliest=5)
    with pytest.raises(EngineError, match="cannot be bound"):
        engine.bind("logits", torch.zeros(VOCABULARY + 1))
    weights = torch.zeros(VOCABULARY)
    weights[6] = 1.0
    engine.bind("logits", weights)
    engine.commit(4)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    assert generate(engine, requests_for([[1]], [0], sampling)).samples[0].token_ids == [6]
    with pytest.raises(EngineError, match="vocabulary is 8"):
        generate(engine, requests_for([[8]], [0], sampling))


def test_the_page_names_files_fields_and_methods_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:mrlhf|tests)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path
    names = {name for name in vars(InferenceEngine) if not name.startswith("_")}
    names |= set(InferenceEngine.__annotations__)
    assert not [name for name in names - NOT_ON_THE_PAGE if f"`{name}`" not in page]
