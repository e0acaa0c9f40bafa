"""configs/recipes/turns/README.md is followed: the game is learned, the other tasks run shortly."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrlhf.config.user_code import load_member
from mrlhf.episodes.environments.api import Trajectory
from tests.e2e.programs import ROOT, read_lines, run_commands, succeed
from tests.pages import commands_of

DATA = commands_of("configs/recipes/turns/README.md", "prepare.py")
GUESS = commands_of("configs/recipes/turns/README.md", "turns/(sft|ppo).yaml$|report.py")
WITHOUT_CRITIC = commands_of("configs/recipes/turns/README.md", "guess_otb.yaml$")
CALCULATOR = commands_of("configs/recipes/turns/README.md", "calculator")
ALPHABET = commands_of("configs/recipes/turns/README.md", "alphabet")
STICKS = commands_of("configs/recipes/turns/README.md", "sticks")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, with the data of all tasks."""
    directory = tmp_path_factory.mktemp("turns")
    for name in ("configs", "launch", "tools"):
        (directory / name).symlink_to(ROOT / name)
    succeed(run_commands(DATA, cwd=directory))
    return directory


@pytest.fixture(scope="module")
def game(directory: Path) -> Path:
    """The directory of the game's runs, which are as long as the page has them."""
    succeed(run_commands(GUESS, cwd=directory))
    return directory / "runs" / "turns"


def test_the_policy_needs_fewer_guesses(game: Path) -> None:
    """Three seeds began at 0.36 on average and ended at 0.42 to 0.50; a perfect player has 0.60.

    They found 0.09 to 0.20 more of the numbers than at the start.
    """
    summary = json.loads((game / "guess" / "ppo" / "summary.json").read_text(encoding="utf-8"))
    assert summary["reward_start"] < 0.5 and summary["reward_final"] > 0.39
    assert summary["final_sampled_accuracy"] > summary["start_sampled_accuracy"] + 0.04


def test_the_engine_and_the_trainer_agree_on_every_turn(game: Path) -> None:
    steps = _steps(game / "guess" / "ppo")
    _check_episodes(steps)
    assert max(row["episodes/turns/max"] for row in steps) == 8


def test_the_report_is_written(game: Path) -> None:
    assert "episodes/turns/mean" in (game / "report.html").read_text(encoding="utf-8")


def test_turns_are_compared_with_turns(game: Path) -> None:
    """Advantages are differences of rewards in 0..1; those that GRPO divides go beyond 1.8."""
    succeed(run_commands(WITHOUT_CRITIC, "trainer.total_steps=2", cwd=game.parents[1]))
    steps = _steps(game / "guess" / "otb")
    _check_episodes(steps)
    assert len(steps) == 2
    assert all(-1.5 < row["critic/advantages/min"] < 0 for row in steps)
    assert all(0 < row["critic/advantages/max"] < 1.5 for row in steps)


def test_the_calculator_is_called_in_some_of_the_first_answers(directory: Path) -> None:
    steps = _run_shortly(CALCULATOR, directory, "calculator", imitated=100)
    assert all(0 < row["episodes/tool_calls/mean"] < 1 for row in steps)
    assert all(row["episodes/turns/max"] == 2 for row in steps)


def test_lists_are_rewarded_at_every_turn(directory: Path) -> None:
    """No response has a score beside the rewards of its turns."""
    steps = _run_shortly(ALPHABET, directory, "alphabet", imitated=150)
    assert all(row["episodes/turns/max"] == 3 for row in steps)
    assert all(row["reward/environment"] == 0 for row in steps)
    assert all(0 < row["critic/score/mean"] < 1 for row in steps)
    assert all(row["training/equal_scores"] == 0 for row in steps)


def test_a_list_is_right_if_it_has_all_names_so_far_in_order() -> None:
    game = load_member(ROOT / "configs/recipes/turns/alphabet.py", "AlphabetSort")()
    game.reset({"names": [["flo", "ben"], ["ada", "cy"], ["gus", "eve"]]})

    assert game.reply("ben\nflo") == "ada\ncy"
    assert game.turn_reward() == pytest.approx(1 / 3)
    assert game.turn_reward() == 0  # a turn without a list earns nothing
    assert game.reply("ben\nflo\nada\ncy") == "gus\neve"
    assert game.turn_reward() == 0
    assert game.reply("ada\nben\ncy\neve\nflo\ngus") is None
    assert game.turn_reward() == pytest.approx(1 / 3)
    assert game.reward() == {"score": 0.0, "acc": 0.0, "right_turns": 2.0}


def test_each_move_of_a_game_has_a_reward_of_its_own(directory: Path) -> None:
    steps = _run_shortly(STICKS, directory, "sticks", imitated=100)
    assert all(row["reward/environment"] == 0 for row in steps)
    assert all(row["reward/environment/12 left/reward"] > -1 for row in steps)
    assert all(1 < row["episodes/contexts/mean"] < 12 for row in steps)


@pytest.mark.parametrize(
    ("sticks", "moves", "rewards"),
    [
        (5, ["1", "2", "2"], {"5 left": 1.0, "4 left": 0.0, "2 left": 1.0}),
        (4, ["1", "3"], {"4 left": 0.0, "3 left": 1.0}),
        (3, ["3"], {"3 left": 1.0}),
        (2, ["3"], {"2 left": -1.0}),  # more than are left
        (5, ["1", "1", "no"], {"5 left": 0.0, "4 left": 1.0, "3 left": -1.0}),
    ],
)
def test_who_takes_the_last_stick_wins(
    sticks: int, moves: list[str], rewards: dict[str, float]
) -> None:
    lead = load_member(ROOT / "configs/recipes/turns/sticks.py", "sticks")
    engine = _Moves(moves)
    made = asyncio.run(lead(engine, {"sticks": sticks}, None))
    assert {move.role: move.reward for move in made} == rewards
    assert engine.told == [role.removesuffix(" left") for role in rewards]


@pytest.mark.parametrize(
    ("sticks", "moves", "told", "won"),
    [
        (6, ["1", "1"], ["6", "4"], 0.0),
        (5, ["3"], ["5"], 0.0),
        (2, ["3"], ["2"], 0.0),  # more than are left
        (3, ["3"], ["3"], 1.0),
    ],
)
def test_the_best_player_wins_what_it_can(
    sticks: int, moves: list[str], told: list[str], won: float
) -> None:
    engine = _Moves(moves)
    row = {"sticks": sticks, "opponent": "best"}
    lead = load_member(ROOT / "configs/recipes/turns/sticks.py", "sticks")
    *others, last = asyncio.run(lead(engine, row, None))
    assert engine.told == told
    assert last.reward == {"score": won, "acc": won}
    assert not any(move.reward for move in others)


class _Moves:
    """The engine of a policy whose moves are known."""

    def __init__(self, moves: list[str]) -> None:
        self.left = list(moves)
        self.told: list[str] = []

    async def prompt(self, text: str) -> Trajectory:
        self.told.append(text)
        return Trajectory([])

    async def generate(self, asked: Trajectory) -> Trajectory:
        return replace(asked, text=self.left.pop(0))


def _run_shortly(
    commands: list[str], directory: Path, task: str, imitated: int
) -> list[dict[str, Any]]:
    """Imitate examples for some steps, and then learn for two by each method.

    Returns the metrics of two steps without a critic, and then of two with one.
    """
    sft, *methods = commands
    succeed(run_commands([sft], f"trainer.total_steps={imitated}", cwd=directory))
    for method in methods:
        succeed(run_commands([method], "trainer.total_steps=2", cwd=directory))

    runs = directory / "runs" / "turns" / task
    steps = _steps(runs / "grpo") + _steps(runs / "ppo")
    _check_episodes(steps)
    assert ["critic/vf_loss" in row for row in steps] == [False, False, True, True]
    return steps


def _steps(run: Path) -> list[dict[str, Any]]:
    """The metrics of each training step."""
    return [row for row in read_lines(run / "metrics.jsonl") if row["step"]]


def _check_episodes(steps: list[dict[str, Any]]) -> None:
    """No episode failed, and the trainer's probabilities are those of the engine."""
    assert max(row["training/rollout_probs_diff_max"] for row in steps) < 1e-4
    assert all(row["episodes/failed"] == 0 for row in steps)
