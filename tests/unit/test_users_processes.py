"""What users' code starts behaves as in plain Python, and signals of the job spoil no score."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrlhf.episodes.environments.host import EnvironmentHost, ToolLimits
from mrlhf.episodes.environments.protocol import EnvironmentReference, Outcome
from mrlhf.errors import EnvironmentFault, RewardError
from mrlhf.rewards.custom import CustomReward, Limits, load_custom
from mrlhf.rewards.interface import RewardInput
from tests import adapter_folder

HELPERS = '''
import asyncio, concurrent.futures, multiprocessing, os, signal, subprocess, threading, time

def double(x):
    return 2 * x

def sleep():
    time.sleep(1000)

def pool(method):
    with multiprocessing.get_context(method).Pool(2) as workers:
        return workers.map(double, [1, 2]) == [2, 4]

def executor(method):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as workers:
        return list(workers.map(double, [1, 2])) == [2, 4]

def process(method):
    helper = multiprocessing.get_context(method).Process(target=sleep)
    helper.start()
    helper.terminate()
    helper.join()
    return helper.exitcode == -signal.SIGTERM

def program(send):
    helper = subprocess.Popen(["sleep", "1000"])
    send(helper)
    return helper.wait() in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)

def fork(number):
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number

def interrupted_fork():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, b"x")
            time.sleep(1000)
        except KeyboardInterrupt:
            os._exit(7)
    os.read(read, 1)
    os.kill(pid, signal.SIGINT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

async def ask():
    helper = await asyncio.create_subprocess_exec("sleep", "1000")
    helper.terminate()
    return await helper.wait() == -signal.SIGTERM

def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(fork(signal.SIGTERM)))
    thread.start()
    thread.join()
    return found == [True]

WAYS = {
    "pool fork": lambda: pool("fork"),
    "pool spawn": lambda: pool("spawn"),
    "pool forkserver": lambda: pool("forkserver"),
    "executor fork": lambda: executor("fork"),
    "executor spawn": lambda: executor("spawn"),
    "process fork": lambda: process("fork"),
    "process spawn": lambda: process("spawn"),
    "terminate": lambda: program(lambda helper: helper.terminate()),
    "SIGINT": lambda: program(lambda helper: helper.send_signal(signal.SIGINT)),
    "SIGUSR1": lambda: program(lambda helper: helper.send_signal(signal.SIGUSR1)),
    "timeout": lambda: subprocess.run(["timeout", "0.1", "sleep", "1000"]).returncode == 124,
    "fork SIGTERM": lambda: fork(signal.SIGTERM),
    "fork SIGUSR1": lambda: fork(signal.SIGUSR1),
    "fork SIGINT": interrupted_fork,
    "thread": in_a_thread,
    "asyncio": lambda: asyncio.run(ask()),
}

def waits_for_a_program(folder):
    """Say that the program runs; its end by a signal gives another answer."""
    helper = subprocess.Popen(["sleep", "1000" if not os.listdir(folder) else "0"])
    open(os.path.join(folder, f"{os.getpid()} {helper.pid}"), "w").close()
    return helper.wait()

def helps(data_source, solution_str, ground_truth, extra_info):
    return WAYS[solution_str]()

def waits(data_source, solution_str, ground_truth, extra_info):
    try:
        return 1.0 - abs(waits_for_a_program(solution_str))
    except BaseException:
        return -5.0

def ends_itself(data_source, solution_str, ground_truth, extra_info):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)

class Environment:
    def reset(self, row):
        self.row = row
        return "Begin."

    def help(self, way: str) -> str:
        return str(WAYS[way]())

    def wait(self, folder: str) -> str:
        return str(waits_for_a_program(folder))

    def scribble(self, text: str) -> str:
        write(text)

    def reward(self):
        write(self.row["writes"])
        return 1.0

    def turn_reward(self):
        write(self.row.get("writes_a_turn", ""))
        return 1.0

def write(text):
    for entry in os.scandir("/proc/self/fd"):
        if text and os.path.islink(entry) and "socket" in os.readlink(entry):
            os.write(int(entry.name), text.encode() + b"\\n")

async def rollout(engine, row, sampling):
    write(row["writes"])
    await asyncio.sleep(1000)
'''


SAMPLING = {**adapter_folder.SAMPLING, "max_tokens": 9, "max_turns": 9}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "code.py"  # as a module of Python is called
    path.write_text(HELPERS, encoding="utf-8")
    return path


def _ways() -> list[str]:
    found: dict[str, dict[str, object]] = {}
    exec(HELPERS, found)
    return list(found["WAYS"])


@pytest.fixture(scope="module")
def reward(file: Path) -> Iterator[CustomReward]:
    # The launcher starts ranks with signals held back, which their processes inherit.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    made = load_custom(f"{file}:helps", Limits(60.0))
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    yield made
    made.close()


@pytest.fixture(scope="module")
def host(file: Path) -> Iterator[EnvironmentHost]:
    references = {
        name: EnvironmentReference(f"{file}:{name}") for name in ("Environment", "rollout")
    }
    made = EnvironmentHost(references, ToolLimits(timeout_s=60.0))
    yield made
    made.close()


def _input(solution: str) -> RewardInput:
    return RewardInput("sums", "3+4=", solution, "7", {}, 1)


def _outcome(host: EnvironmentHost) -> Outcome:
    while not (outcomes := host.poll(60.0)):
        pass
    return outcomes[0]


@pytest.mark.parametrize("way", _ways())
def test_helpers_of_a_reward_function_end_as_in_plain_python(
    reward: CustomReward, way: str
) -> None:
    assert reward.score([_input(way)])[0].score == 1.0


def test_helpers_of_an_environment_end_as_in_plain_python(host: EnvironmentHost) -> None:
    host.begin(0, "Environment", {"writes": ""}, seed=0)
    _outcome(host)
    host.turn(0, "", [("help", {"way": way}) for way in _ways()])
    assert {result.content for result in _outcome(host).results} == {"True"}
    host.end(0)


def _pids(folder: Path) -> list[int]:
    """The pids that a call has written: of its process, and of the program that it waits for."""
    while not (names := os.listdir(folder)):
        time.sleep(0.01)
    return [int(pid) for pid in names[0].split()]


def _signal_at_once(number: signal.Signals, child: int, *others: int) -> None:
    """Signal processes so that the child cannot see the end of one before its own signal."""
    os.kill(child, signal.SIGSTOP)
    for pid in (*others, child):
        os.kill(pid, number)
    os.kill(child, signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_a_job_changes_no_score(
    file: Path, number: signal.Signals, tmp_path: Path
) -> None:
    reward = load_custom(f"{file}:waits", Limits(60.0))
    folder = tmp_path / "calls"
    folder.mkdir()

    def send() -> None:
        child, helper = _pids(folder)
        _signal_at_once(number, child, helper)

    sender = threading.Thread(target=send)
    sender.start()
    assert reward.score([_input(str(folder))])[0].score == 1.0
    sender.join()
    assert len(os.listdir(folder)) == 2
    reward.close()


def test_a_reward_function_that_ends_itself_is_told(file: Path) -> None:
    reward = load_custom(f"{file}:ends_itself", Limits(60.0))
    with pytest.raises(RewardError, match=r"ended its process \(signal SIGTERM\)"):
        reward.score([_input("7")])
    reward.close()


def test_a_signal_to_all_processes_of_a_job_is_no_answer(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops meanwhile; if it does not, the episode has failed."""
    references = {"": EnvironmentReference(f"{file}:Environment")}
    host = EnvironmentHost(references, ToolLimits(timeout_s=60.0))
    for number in range(2):
        host.begin(number, "", {}, seed=0)
        _outcome(host)
    host.turn(0, "", [("wait", {"folder": str(tmp_path)})])
    host.poll(0.0)
    helper = _pids(tmp_path)[1]
    child = _pids(tmp_path)[0]
    server = host._servers[""].process._popen.pid
    _signal_at_once(signal.SIGTERM, child, helper, host._episodes[1].pid, server)
    while not all(host._episodes[number].ended for number in range(2)):
        assert host.poll(0.1) == []
    host.turn(1, "Go on.", [])
    assert host.poll(0.0) == []

    for number in range(2):
        host._episodes[number].deadline = time.monotonic()
    outcomes = host.poll(60.0)
    assert [outcome.failure for outcome in outcomes] == [
        "wait ended its process (signal SIGTERM)",
        "reply ended its process (signal SIGTERM)",
    ]
    host.end(0)
    host.begin(2, "", {}, seed=0)
    assert _outcome(host).observation == "Begin."
    host.close()


def _line(kind: str, **fields: Any) -> str:
    return json.dumps([[kind, fields]])


FORMS = ['"ab"', "{}", "[]", "[1, 2, 3]", '{"a": 1, "b": 2}', '[["Done", 5]]', "[" * 100_000]
FORMS += [_line("Done", answer=5), _line("Done", answer={"x": 1}), _line("Done"), "nonsense"]
FORMS += [_line("Failure"), _line("Failure", summary=1, trace=""), _line("Other", a=1)]
FORMS += [_line("Request", method="reset"), _line("Question", number=0)]


NO_RANGE = {"token_ids": [1], "turns": [1], "role": "", "reward": None, "turn_rewards": []}
# What is no answer to the request that is open.
WRONG = {
    "call": [
        _line("Question", number=0, what="encode", arguments={}),
        _line("Done", answer={"content": 5, "is_error": False}),
        _line("Done", answer={"content": "x"}),
    ],
    "turn_reward": [_line("Done", answer={"turn_reward": "much", "ended": False})],
    "reward": [_line("Done", answer={"reward": given}) for given in (math.nan, {"points": 1})],
    "rollout": [
        *(_line("Question", number=0, what="generate", arguments=given) for given in ({}, 5)),
        *(
            _line("Done", answer={"trajectories": given})
            for given in ([], 5, [{"token_ids": [1]}], [NO_RANGE])
        ),
    ],
}


@pytest.mark.parametrize(("where", "forms"), WRONG.items())
def test_what_is_written_to_the_connection_fails_its_episode_alone(
    host: EnvironmentHost, where: str, forms: list[str]
) -> None:
    for form in FORMS + forms:
        if where == "rollout":
            host.begin(1, "rollout", {"writes": form}, seed=0, sampling=SAMPLING)
        else:
            late = {"writes_a_turn": form if where == "turn_reward" else "", "writes": form}
            host.begin(1, "Environment", late, seed=0)
            _outcome(host)
            if where == "reward":
                host.ask_reward(1)
            else:
                call = ("scribble", {"text": form if where == "call" else ""})
                host.turn(1, "", [call])
        assert (_outcome(host).failure or "").endswith("wrote to its connection"), form
        host.end(1)


def test_a_process_of_environments_that_hangs_is_told_in_a_line(file: Path) -> None:
    references = {"": EnvironmentReference(f"{file}:Environment")}
    limits = ToolLimits(timeout_s=0.5)
    host = EnvironmentHost(references, limits)
    host._servers[""]._limits = replace(limits.of_process, timeout_s=0.5)
    host.begin(0, "", {}, seed=0)
    _outcome(host)
    os.kill(host._servers[""].process._popen.pid, signal.SIGSTOP)
    message = r"the process of .*Environment took more than 0.5 s .* raise rollout.tool_timeout_s"
    with pytest.raises(EnvironmentFault, match=message):
        host.begin(1, "", {}, seed=0)
    host.end(0)
    host.close()


def test_a_process_of_environments_has_the_time_of_its_calls() -> None:
    seconds = [ToolLimits(timeout_s=given).of_process.timeout_s for given in (0.5, 30.0, 300.0)]
    assert seconds == [30.5, 60.0, 330.0]
