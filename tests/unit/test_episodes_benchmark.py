"""The benchmark of episodes: its game, its table, and a smoke run."""

from __future__ import annotations

import json

import pytest

from tests.e2e.programs import ROOT, run_program, succeed


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("guesses", "said", "score"),
    [
        ([7], ["right"], 1.0),
        ([3, 9, 7], ["higher", "lower", "right"], 0.75),
        ([3, 9], ["higher", "lower"], 0.0),
        ([1] * 8 + [7], ["higher"] * 8 + ["right"], 0.0),  # a ninth guess does not count
    ],
)
def test_the_game_is_the_same_for_both(guesses, said, score):
    from episodes_game import OursGame, TrlGame

    row = {"answer": "7", "seconds": 0.0}
    ours = OursGame()
    ours.reset(row)
    other = TrlGame()
    other.reset(**row, prompt=[])
    assert [ours.guess(number) for number in guesses] == said
    assert [other.guess(number) for number in guesses] == said
    assert ours.reward() == other.get_reward() == score


def test_a_table_compares_tokens_a_second_step_by_step():
    from episodes import table

    step = {"cpu_seconds": 3.0, "calls": 12, "reward": 0.5, "phases": {"gen": 1.0}}
    ours = {"contender": "ours", "delay": 0.2, "ranks": 2, "options": [], "episodes": 4}
    ours["steps"] = [{**step, "seconds": 2.0, "tokens": 800}, {**step, "seconds": 2, "tokens": 400}]
    trl = {**ours, "contender": "trl"}
    trl["steps"] = [{**step, "seconds": 8.0, "tokens": 800}, {**step, "seconds": 4, "tokens": 400}]
    assert table([trl, ours])[2:] == [
        "| 0.2 | trl | 2 x 1 | 6.00 | 1.00 | 3.00 | 100 | 150 | 3.00 | 0.50 | 3.00 (2.00–4.00) |",
        "| 0.2 | ours | 2 x 1 | 2.00 | 1.00 | 3.00 | 300 | 150 | 3.00 | 0.50 |  |",
    ]


def test_a_quick_run(tmp_path):
    file = tmp_path / "rows.json"
    command = ["benchmarks/episodes.py", "--quick", "--work", str(tmp_path), "--json", str(file)]
    output = succeed(run_program(command))

    [row] = json.loads(file.read_text())
    assert (row["contender"], row["episodes"], row["ranks"]) == ("ours", 8, 1)
    [step] = row["steps"]
    assert 8 <= step["tokens"] <= 8 * 288
    assert step["seconds"] >= step["phases"]["gen"] > 0
    assert "| 0.01 | ours | 1 x 2 |" in output
