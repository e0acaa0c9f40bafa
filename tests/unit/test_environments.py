"""Environments and tools in their processes: schemas, answers, and what is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrlhf.episodes.environments import built_in, programs
from mrlhf.episodes.environments.host import EnvironmentHost, ToolLimits, describe
from mrlhf.episodes.environments.protocol import EnvironmentReference, Outcome
from mrlhf.errors import EnvironmentFault
from mrlhf.rewards.interface import LARGEST_SCORE
from tests.leftovers import assert_all_end, is_alive
from tests.unit.misbehaving import GAME


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "game.py"
    path.write_text(GAME, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def host(file: Path) -> Iterator[EnvironmentHost]:
    references = {
        "game": EnvironmentReference(f"{file}:Guess", ("calculator",)),
        "tools": EnvironmentReference(None, (f"{file}:slow", f"{file}:dies", "python")),
    }
    made = EnvironmentHost(references, ToolLimits(timeout_s=5.0, memory_mb=2000, workers=4))
    yield made
    made.close()


def _wait(host: EnvironmentHost, count: int = 1) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        outcomes += host.poll(60.0)
    return outcomes


def _begun(host: EnvironmentHost, number: int, **row: Any) -> Outcome:
    host.begin(number, "game", {"secret": 5, "most": 9} | row, seed=number)
    return _wait(host)[0]


def _turn(host: EnvironmentHost, number: int, *calls: tuple[str, dict[str, Any]]) -> Outcome:
    host.turn(number, "", calls)
    return _wait(host)[0]


def test_schemas_are_those_of_signatures(host: EnvironmentHost) -> None:
    tools = {tool["function"]["name"]: tool for tool in host.programs["game"].tools}
    names = (
        "guess luck hang leave_a_child nothing much scribble list_much leave_later odd calculator"
    )

    assert list(tools) == names.split()
    assert tools["guess"] == {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the number.",
            "parameters": {
                "type": "object",
                "properties": {
                    "number": {"type": "integer", "description": "your guess, a whole one"},
                    "sure": {"type": "boolean", "default": False},
                },
                "required": ["number"],
                "additionalProperties": False,
            },
        },
    }
    game, stateless = host.programs["game"], host.programs["tools"]
    assert game.has_reward and not stateless.has_reward
    assert stateless.is_stateless and not game.is_stateless


def test_an_episode_from_reset_to_reward(host: EnvironmentHost) -> None:
    assert _begun(host, 1).observation == "Guess up to 9."
    wrong = _turn(host, 1, ("guess", {"number": "4"}), ("calculator", {"expression": "2*(3+4)/7"}))
    assert [(r.name, r.content, r.is_error) for r in wrong.results] == [
        ("guess", '["wrong", 4]', False),
        ("calculator", "2", False),
    ]
    assert wrong.turn_reward == 0.5 and not wrong.ended

    host.turn(1, "list", [])
    assert _wait(host)[0].observation == [{"role": "user", "content": "x"}]
    host.turn(1, "what else", [])
    assert _wait(host)[0].ended  # reply gave None

    right = _turn(host, 1, ("guess", {"number": 5, "sure": True}))
    assert right.results[0].content == "right" and right.ended and right.turn_reward == 1.0
    host.ask_reward(1)
    assert _wait(host)[0].reward == {"score": 1.0, "turns": 2.0}
    host.end(1)


def test_the_environment_of_the_page_can_be_played(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    file = tmp_path / "my_game.py"
    file.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    host = EnvironmentHost({"game": EnvironmentReference(f"{file}:GuessTheNumber")}, ToolLimits())
    host.begin(0, "game", {"answer": "7"}, seed=0)
    assert _wait(host)[0].failure is None
    assert _turn(host, 0, ("guess", {"number": 9})).results[0].content == "lower"
    assert _turn(host, 0, ("guess", {"number": 7})).ended
    host.ask_reward(0)
    assert _wait(host)[0].reward == 1.0
    host.close()


def test_random_numbers_begin_with_the_seed(host: EnvironmentHost) -> None:
    drawn = []
    for seed in (3, 4, 3):
        host.begin(2, "game", {"secret": 5, "most": 9}, seed=seed)
        _wait(host)
        drawn.append(_turn(host, 2, ("luck", {})).results[0].content)
        host.end(2)
    assert drawn[0] == drawn[2] != drawn[1]


def test_sets_have_the_same_order_in_each_process(file: Path) -> None:
    orders = set()
    for _ in range(3):
        host = EnvironmentHost(
            {"game": EnvironmentReference(None, (f"{file}:order",))}, ToolLimits()
        )
        host.begin(0, "game", {}, seed=0)
        _wait(host)
        orders.add(_turn(host, 0, ("order", {})).results[0].content)
        host.close()
    assert len(orders) == 1


def test_a_long_answer_may_be_read_slowly(file: Path) -> None:
    references = {"game": EnvironmentReference(None, (f"{file}:emojis",))}
    host = EnvironmentHost(references, ToolLimits(timeout_s=1.0))
    host.begin(0, "game", {}, seed=0)
    _wait(host)
    host.turn(0, "", [("emojis", {})])
    outcomes: list[Outcome] = []
    while not outcomes:
        time.sleep(0.3)  # the engine's steps; each takes less than a tenth of the answer
        outcomes = host.poll(0.0)
    assert outcomes[0].results[0].content == "\U0001f600" * 200_000
    host.close()


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("guess", {}, "Error: ValueError: guess got wrong arguments: number: Field required"),
        (
            "guess",
            {"number": "x", "far": 1},
            "Error: ValueError: guess got wrong arguments: number: Input should be a valid "
            "integer, unable to parse string as an integer; far: Extra inputs are not permitted",
        ),
        ("much", {}, "x" * 200_000),
        ("list_much", {}, '["x"' + ', "x"' * 39999 + ","),
        ("odd", {}, "a?b"),
        ("nothing", {}, "None"),
        (
            "_private",
            {},
            "Error: there is no tool '_private'; there is guess, luck, hang, leave_a_child, "
            "nothing, much, scribble, list_much, leave_later, odd, calculator",
        ),
        (
            "calculator",
            {"expression": "__import__('os')"},
            "Error: ValueError: only numbers, + - * / // % ** and parentheses are allowed",
        ),
        ("calculator", {"expression": "9**9**9"}, "Error: ValueError: an exponent is above 64"),
        ("calculator", {"expression": "1/0"}, "Error: ZeroDivisionError: division by zero"),
    ],
)
def test_a_call_that_fails_tells_the_policy(
    host: EnvironmentHost, name: str, arguments: dict[str, Any], content: str
) -> None:
    _begun(host, 3)
    (result,) = _turn(host, 3, (name, arguments)).results
    assert result.content == content and result.is_error == content.startswith("Error")
    host.end(3)


@pytest.mark.parametrize(
    ("row", "calls", "failure"),
    [
        ({"raises": True}, [], "reset raised KeyError: 'no such row'"),
        (
            {"odd": True},
            [],
            'reset returned 7; return a text, a list of {"role", "content"} messages, or None',
        ),
        ({}, ["scribble"], "scribble wrote to its connection"),
        (
            {},
            ["guess"] * 3,
            "turn_reward returned 1e+300; return a finite number from -1e+15 to 1e+15",
        ),
    ],
)
def test_an_episode_that_cannot_go_on_says_why(
    host: EnvironmentHost, row: dict[str, Any], calls: list[str], failure: str
) -> None:
    outcome = _begun(host, 4, **row)
    if calls:
        given = {"number": 1} if calls[0] == "guess" else {}
        outcome = _turn(host, 4, *[(call, given) for call in calls])
    assert outcome.failure == failure
    host.end(4)


def test_what_is_printed_is_in_the_log(
    host: EnvironmentHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    _begun(host, 12)
    for number in (1, 2):
        _turn(host, 12, ("guess", {"number": number}))
        assert caplog.text.endswith(f"an environment printed: asked for {number}\n")
    host.end(12)


def test_a_process_that_ends_between_two_requests_is_found(host: EnvironmentHost) -> None:
    _begun(host, 9)
    assert _turn(host, 9, ("leave_later", {})).results[0].content == "None"
    while not host._episodes[9].ended:
        assert host.poll(1.0) == []
    outcome = _turn(host, 9, ("guess", {"number": 1}))
    assert outcome.failure == "guess ended its process (exit code 5)"
    host.end(9)


def test_a_score_must_be_a_number(host: EnvironmentHost) -> None:
    _begun(host, 5)
    host.ask_reward(5)
    failure = str(_wait(host)[0].failure)
    assert failure.startswith("reward, as 'score', returned 'bad'; return a finite number")
    assert programs.LARGEST_SCORE == LARGEST_SCORE
    host.end(5)


def test_functions_go_on_in_another_process(host: EnvironmentHost) -> None:
    host.begin(7, "tools", {}, seed=0)
    _wait(host)
    program = "import sys; print(1 + 1); sys.exit('bad')"
    outcome = _turn(
        host, 7, ("dies", {"code": 4}), ("slow", {"seconds": 60}), ("python", {"code": program})
    )
    assert [(result.name, result.content) for result in outcome.results] == [
        ("dies", "Error: dies ended its process (exit code 4)"),
        ("slow", "Error: slow took more than 5 s and was stopped"),
        ("python", "2\nbad"),
    ]
    host.end(7)


def test_of_what_a_program_prints_little_is_kept() -> None:
    tracemalloc.start()
    said = built_in.python("for _ in range(200): print('x' * 10**6)\n1 / 0")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert said == "x" * 20_000 + "ZeroDivisionError: division by zero"
    assert peak < 10**7  # 200 MB are printed


def test_many_episodes_share_few_workers(host: EnvironmentHost) -> None:
    numbers = range(100, 150)
    for number in numbers:
        host.begin(number, "tools", {}, seed=0)
    _wait(host, len(numbers))
    for number in numbers:
        host.turn(number, "", [("slow", {})])
    outcomes = _wait(host, len(numbers))
    assert sorted(outcome.episode for outcome in outcomes) == list(numbers)
    assert {outcome.results[0].content for outcome in outcomes} == {'{"slept": 0.05}'}
    for number in numbers:
        host.end(number)


def test_a_child_can_be_stopped_as_soon_as_it_has_begun(host: EnvironmentHost) -> None:
    for number in range(200, 300):
        host.begin(number, "game", {"hangs": True}, seed=0)
        host._start_next()
        host.end(number)
    assert _begun(host, 200).failure is None
    host.end(200)


def test_nothing_is_left_when_the_trainer_is_killed(file: Path) -> None:
    program = f"""
import time
from mrlhf.episodes.environments.host import EnvironmentHost, ToolLimits
from mrlhf.episodes.environments.protocol import EnvironmentReference
host = EnvironmentHost({{"": EnvironmentReference("{file}:Guess")}}, ToolLimits())
host.begin(0, "", {{"secret": 1, "most": 2}}, seed=0)
host.poll(60.0)
host.turn(0, "", [("leave_a_child", {{}}), ("hang", {{}})])
while not host._episodes[0].results:
    host.poll(1.0)
server = host._servers[""].process._popen.pid
print(server, host._episodes[0].pid, host._episodes[0].results[0].content, flush=True)
time.sleep(1000)
"""

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 3 and all(map(is_alive, pids))
        trainer.send_signal(signal.SIGKILL)
        assert_all_end(*pids)


@pytest.mark.parametrize(
    ("code", "reference", "message"),
    [
        ("class A:\n def f(self, x): ...", "A", "A in {file}: tool f: argument x has no type"),
        ("class A:\n def f(self, *x): ...", "A", "tool f takes *x; name each argument"),
        ("class A:\n def __init__(self, x): ...", "A", "A cannot be made without x"),
        ("class B: ...", "A", "has no class or async function 'A'"),
        ("A = 3", "A", "A in {file} is of type int, and no class or async function"),
        ("def A(): ...", "A", "A in {file} is neither a class nor an async function"),
        ("1 / 0", "A", "{file} cannot be imported: ZeroDivisionError: division by zero (line 1)"),
        ("class A:\n def calculator(self): ...", "A", "A in {file}: two tools have the name c"),
        ("class A:\n def f(self, x: 'Missing'): ...", "A", "tool f: its types cannot be read"),
        ("class A:\n async def f(self): ...", "A", "tool f is an async function"),
        ("class A:\n def f(self):\n  yield 1", "A", "tool f is a generator function"),
        ("class A:\n async def reset(self, row): ...", "A", "reset is an async function"),
        ("class A:\n def reset(self): ...", "A", "reset must accept self, row: too many pos"),
        ("class A:\n def reply(self): ...", "A", "reply must accept self, text: too many pos"),
        ("class A:\n def reward(self, x): ...", "A", "reward must accept self: missing a req"),
        ("class A:\n def f(self, x: int, /): ...", "A", "tool f must accept self, x: 'x' "),
        ("class A:\n def done(self): ...", "A", "A in {file}: done is a method; make it a prop"),
        ("class A:\n def f(self, x: 3): ...", "A", "tool f: the type of argument x has no JSON"),
        ("class A:\n def f(): ...", "A", "tool f must accept self: too many pos"),
        ("async def A(engine, row): ...", "A", "function must accept engine, row, sampling: to"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, code: str, reference: str, message: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(code, encoding="utf-8")
    with pytest.raises(EnvironmentFault) as error:
        describe({"": EnvironmentReference(f"{file}:{reference}", ("calculator",))}, ToolLimits())
    assert message.format(file=file) in str(error.value)
    assert "\n" not in str(error.value) and "http" not in str(error.value)


def test_methods_may_stand_in_a_class_in_any_way(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import functools\nclass Says:\n def __call__(self, text): ...\n"
        "class A:\n @staticmethod\n def reset(row): ...\n reply = Says()\n"
        " @classmethod\n def turn_reward(cls): ...\n @functools.cache\n def reward(self): ...\n"
        " def f(self, *, x: int = 1): ...\n",
        encoding="utf-8",
    )
    [program] = describe({"": EnvironmentReference(f"{file}:A")}, ToolLimits()).values()
    assert program.has_reward and len(program.tools) == 1


def test_tools_of_files_with_like_names_are_their_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tools = []
    for number, name in enumerate(("a/b", "a_b", "a-b")):
        file = tmp_path / f"{name}.py"
        file.write_text(f"def tool{number}(): ...", encoding="utf-8")
        tools.append(f"{file}:tool{number}")
    [program] = describe({"": EnvironmentReference(None, tuple(tools))}, ToolLimits()).values()
    assert [tool["function"]["name"] for tool in program.tools] == ["tool0", "tool1", "tool2"]


def test_a_function_that_is_no_tool_is_named_and_not_the_class(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("class A: ...\ndef bad(x): ...", encoding="utf-8")
    with pytest.raises(EnvironmentFault, match=f": bad in {file}: tool bad: argument x has no"):
        describe({"": EnvironmentReference(f"{file}:A", (f"{file}:bad",))}, ToolLimits())


def test_a_missing_file_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=r"there is no file nowhere\.py"):
        describe({"": EnvironmentReference("nowhere.py:A")}, ToolLimits())
