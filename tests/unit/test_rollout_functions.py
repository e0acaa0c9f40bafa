"""Rollout functions in their processes: what they ask for, and what they may return."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrlhf.episodes.environments.host import EnvironmentHost, ToolLimits
from mrlhf.episodes.environments.protocol import Answer, EnvironmentReference, Outcome
from tests.adapter_folder import SAMPLING

FUNCTIONS = '''
import asyncio, os, random, time


async def talks(engine, row, sampling):
    asked = await engine.prompt(row["prompt"])
    one, two = await asyncio.gather(engine.generate(asked), engine.generate(asked, max_tokens=1))
    told = await engine.tell(one, [{"role": "tool", "name": "x", "content": "more"}])
    one = await engine.generate(told)
    assert asked.turns == () and two.turns[0][1] == len(asked.token_ids)  # they stay as they were
    one.reward, one.role = {"score": random.random(), "most": sampling.max_tokens}, "first"
    text = await engine.decode(await engine.encode("words"))
    two.role = f"{text} {one.text} {one.stopped}"
    return [one, two]


async def calls(engine, row, sampling):
    """The same loop as with an environment, by hand."""
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    tool = {"name": "search", "description": "Searches.", "parameters": schema}
    one = await engine.prompt(row["prompt"], tools=[{"type": "function", "function": tool}])
    one = await engine.generate(one)
    while one.calls:
        found = [{"role": "tool", "name": c["name"], "content": str(c)} for c in one.calls]
        one = await engine.generate(await engine.tell(one, found))
    one.role = one.content + one.problem
    return one


async def survives(engine, row, sampling):
    """What is refused can be caught."""
    problems = []
    tell = engine.tell(await engine.prompt("a"), "b")
    told = await engine.tell(await engine.generate([1]), "b")
    twice = engine.tell(told, "c")
    for begin in (engine.generate([1] * 99), engine.generate(["a"]), tell, twice):
        try:
            await begin
        except (engine.NoRoom, ValueError) as error:
            problems.append(f"{type(error).__name__}: {error}")
    last = await engine.generate(told)
    await engine.tell(last, "d")
    last.role = "; ".join(problems) + "\\ud800"
    return last


async def works(engine, row, sampling):
    """It computes while it waits for the engine."""
    slow = asyncio.ensure_future(engine.generate([5]))
    await asyncio.sleep(0.3)
    quick = await engine.generate([6])
    return [quick, await slow]


async def is_busy(engine, row, sampling):
    """It computes, and takes no answer meanwhile."""
    turns = [asyncio.ensure_future(engine.generate([number])) for number in (5, 6)]
    await asyncio.sleep(0.1)
    while not os.path.exists(row["until"]):
        time.sleep(0.01)
    return [await turn for turn in turns]


async def dies_while_asking(engine, row, sampling):
    asyncio.get_running_loop().call_later(0.2, os._exit, 4)
    await engine.generate([9])


async def gives_up(engine, row, sampling):
    """It asks for more than a connection takes at once, and waits for one answer alone."""
    asked = [asyncio.ensure_future(engine.generate([5] * 10_000)) for _ in range(200)]
    first = await asked[0]
    for one in asked:
        one.cancel()
    return first


async def nothing(engine, row, sampling):
    return []


async def unread(engine, row, sampling):
    return await engine.prompt("a")


async def infinite(engine, row, sampling):
    one = await engine.generate([1])
    one.reward = float("inf")
    return one


async def misspells(engine, row, sampling):
    one = await engine.generate([1])
    one.rewards = 1.0
    return one


async def pays_turns(engine, row, sampling):
    one = await engine.generate(await engine.tell(await engine.generate([1]), "b"))
    one.turn_rewards = [0.5, -1]
    return one


async def pays_too_often(engine, row, sampling):
    one = await engine.generate([1])
    one.turn_rewards = [1, 2]
    return one


async def forgets_to_await(engine, row, sampling):
    return engine.generate([1])
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "own.py"
    file.write_text(FUNCTIONS, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def host(file: Path) -> Iterator[EnvironmentHost]:
    """Of all functions, with more time than any needs."""
    names = [line.split("(")[0][10:] for line in FUNCTIONS.split("\n") if line.startswith("async ")]
    references = {name: EnvironmentReference(f"{file}:{name}") for name in names}
    host = EnvironmentHost(references, ToolLimits(timeout_s=60.0, workers=1))
    yield host
    host.close()


def _answer(host: EnvironmentHost, asked: Outcome, draws: list[list[int]]) -> None:
    """What a trainer answers whose policy says 7, 8 and ends."""
    question = asked.question
    assert question is not None
    number = question.number
    ids = question.arguments.get("token_ids", [])

    if question.what != "generate":
        others: dict[str, Any] = {"prompt": [1, 2, 3], "tell": [4], "encode": [5], "decode": "word"}
        answer = Answer(number, others[question.what])
    elif len(ids) > 50:
        answer = Answer(number, "too long", "no room")
    elif "a" in ids:
        answer = Answer(number, "no tokens", "error")
    else:
        tokens = [7, 8][: question.arguments["max_tokens"]]
        turn = {"token_ids": tokens, "text": "say", "stopped": True, "draw": len(draws)}
        if question.arguments["reads_calls"]:
            call = {"name": "search", "arguments": {"query": "x"}}
            turn |= {"calls": [call][: len(ids) < 6], "content": "c", "problem": "p"}
        draws.append(ids)
        answer = Answer(number, turn)

    host.answer(asked.episode, answer)


def _run(host: EnvironmentHost, *names: str) -> tuple[list[Outcome], list[list[int]]]:
    """What came of an episode of each function, and what each draw followed."""
    for number, name in enumerate(names):
        host.begin(number, name, {"prompt": "hello"}, 5, SAMPLING)
    found = _until_ended(host, len(names))
    for number in range(len(names)):
        host.end(number)
    return found


def _until_ended(host: EnvironmentHost, episodes: int) -> tuple[list[Outcome], list[list[int]]]:
    ended: dict[int, Outcome] = {}
    draws: list[list[int]] = []
    until = time.monotonic() + 60
    while len(ended) < episodes and time.monotonic() < until:
        for outcome in host.poll(0.2):
            if outcome.kind == "ask":
                _answer(host, outcome, draws)
            else:
                ended[outcome.episode] = outcome
    return [ended[number] for number in range(episodes)], draws


def test_a_function_asks_and_returns_trajectories(host: EnvironmentHost) -> None:
    assert all(program.is_function and not program.tools for program in host.programs.values())
    [one, again], draws = _run(host, "talks", "talks")
    assert draws[:3].count([1, 2, 3]) >= 2 and [1, 2, 3, 7, 8, 4] in draws
    first, second = one.trajectories
    assert first["token_ids"] == [1, 2, 3, 7, 8, 4, 7, 8]
    assert [begin for _, begin in first["turns"]] == [3, 6]
    assert second["token_ids"] == [1, 2, 3, 7] and second["role"] == "word say True"
    assert first["role"] == "first" and first["reward"]["most"] == 50
    assert first["reward"] == again.trajectories[0]["reward"]  # by the seed


def test_the_function_of_the_page_leads_an_episode(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    [code] = [block for block in page.split("```python\n") if "async def" in block]
    file = tmp_path / "my_agents.py"
    file.write_text(code.split("```")[0], encoding="utf-8")
    host = EnvironmentHost({"": EnvironmentReference(f"{file}:solve")}, ToolLimits(timeout_s=60.0))
    host.begin(0, "", {"prompt": "What?", "answer": "say"}, 5, SAMPLING)
    [ended], draws = _until_ended(host, 1)
    assert len(ended.trajectories) == len(draws) == 4
    assert [one["reward"] for one in ended.trajectories] == [None, None, None, 1.0]
    host.close()


def test_a_function_shows_tools_and_is_told_the_calls(host: EnvironmentHost) -> None:
    [one], draws = _run(host, "calls")
    assert draws == [[1, 2, 3], [1, 2, 3, 7, 8, 4]]
    assert one.trajectories[0]["role"] == "cp"


def test_a_function_pays_turns(host: EnvironmentHost) -> None:
    [one], _ = _run(host, "pays_turns")
    assert one.trajectories[0]["turn_rewards"] == [0.5, -1.0]


def test_what_is_refused_can_be_caught(host: EnvironmentHost) -> None:
    [one], _ = _run(host, "survives")
    [said] = one.trajectories
    no_turn = (
        "ValueError: tell needs a trajectory that ends with a turn: generate one first, and give "
        "tell all messages that follow it at once"
    )
    # A role is text that can be encoded.
    assert said["role"] == f"NoRoom: too long; ValueError: no tokens; {no_turn}; {no_turn}?"


def test_a_function_that_works_while_the_engine_draws(file: Path) -> None:
    references = {"": EnvironmentReference(f"{file}:works")}
    host = EnvironmentHost(references, ToolLimits(timeout_s=4.0, workers=1))
    host.begin(0, "", {}, 5, SAMPLING)
    asked: list[Outcome] = []
    until = time.monotonic() + 60

    while time.monotonic() < until:
        for outcome in host.poll(0.2):
            if outcome.kind == "rollout":
                # Neither the engine's time nor the order of its answers matters.
                assert [one["token_ids"] for one in outcome.trajectories] == [[6, 7, 8], [5, 7, 8]]
                host.close()
                return
            asked.append(outcome)
            if len(asked) == 2:
                time.sleep(4.2)
                for late in reversed(asked):
                    _answer(host, late, [])
    raise AssertionError("it did not end")


def test_a_large_answer_does_not_wait_until_it_is_taken(file: Path, tmp_path: Path) -> None:
    references = {"": EnvironmentReference(f"{file}:is_busy")}
    host = EnvironmentHost(references, ToolLimits(timeout_s=10.0, workers=1))
    host.begin(0, "", {"until": str(tmp_path / "now")}, 5, SAMPLING)
    asked: list[Outcome] = []
    while len(asked) < 2:
        asked += host.poll(10.0)
    for draw in range(2):
        value = {"token_ids": [7], "text": "x" * 3_000_000, "stopped": True, "draw": draw}
        host.answer(0, Answer(draw, value))
        host.poll(0.0)
    (tmp_path / "now").touch()  # a sender who waits would not come so far
    [ended], _ = _until_ended(host, 1)
    assert [one["token_ids"] for one in ended.trajectories] == [[5, 7], [6, 7]]
    host.close()


def test_a_function_need_not_wait_for_all_it_has_asked_for(host: EnvironmentHost) -> None:
    host.begin(0, "gives_up", {}, 5, SAMPLING)
    asked: list[Outcome] = []
    while not asked:
        asked = host.poll(10.0)
    for number, outcome in enumerate(asked):
        assert outcome.question is not None
        turn = {"token_ids": [7], "text": "x", "stopped": True, "draw": number}
        host.answer(0, Answer(outcome.question.number, turn))
    [ended], _ = _until_ended(host, 1)
    assert ended.failure is None and ended.trajectories[0]["token_ids"][-1] == 7
    host.end(0)


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("nothing", "the rollout function returned []; return a trajectory of the engine or a"),
        ("unread", "returned a trajectory without a turn: generate one, or leave it out"),
        ("misspells", "raised AttributeError: 'Trajectory' object has no attribute 'rewards'"),
        ("infinite", "reward returned inf; return a finite number from -1e+15 to 1e+15"),
        ("pays_too_often", "turn_rewards has 2 numbers for 1 turns; give one for each, or none"),
        ("forgets_to_await", "return a trajectory of the engine or a list of them"),
    ],
)
def test_a_function_that_misbehaves_fails_alone(
    host: EnvironmentHost, name: str, failure: str
) -> None:
    [failed, fine], _ = _run(host, name, "talks")
    assert failed.failure is not None and failure in failed.failure
    assert fine.failure is None and fine.trajectories
    assert not host._episodes


def test_a_process_that_ends_while_it_waits(host: EnvironmentHost) -> None:
    host.begin(0, "dies_while_asking", {}, 5, SAMPLING)
    asked = []
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for outcome in host.poll(0.3):
            if outcome.kind == "ask":
                asked.append(outcome)
                continue
            assert outcome.failure == "rollout ended its process (exit code 4)"
            host.end(0)
            return
        if asked and host._episodes[0].ended:
            _answer(host, asked[0], [])
    raise AssertionError("nobody noticed")
