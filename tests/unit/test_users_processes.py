"""What users' code starts behaves as in plain Python, and signals of the job spoil no score."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrlhf.environments.host import EnvironmentHost, ToolLimits
from mrlhf.environments.interface import EnvironmentReference, Outcome, ToolCall
from mrlhf.errors import RewardError
from mrlhf.rewards.custom import CustomReward, Limits, load_custom
from mrlhf.rewards.interface import RewardInput

HELPERS = '''
import asyncio, concurrent.futures, multiprocessing, os, signal, subprocess, sys, threading, time

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
        return "Begin."

    def help(self, way: str) -> str:
        return str(WAYS[way]())

    def wait(self, folder: str) -> str:
        return str(waits_for_a_program(folder))
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "code.py"  # as a module of Python is called
    path.write_text(HELPERS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def namespace(file: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    exec(HELPERS, found)
    return found


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
    references = {"": EnvironmentReference(f"{file}:Environment")}
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
    host.begin(0, "", {}, seed=0)
    _outcome(host)
    host.turn(0, "", [ToolCall("help", {"way": way}) for way in _ways()])
    assert {result.content for result in _outcome(host).results} == {"True"}
    host.end(0)


def _pids(folder: Path) -> list[int]:
    """The pids that a call has written: of its process, and of the program that it waits for."""
    while not (names := os.listdir(folder)):
        time.sleep(0.01)
    return [int(pid) for pid in names[0].split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_a_job_changes_no_score(
    file: Path, number: signal.Signals, tmp_path: Path
) -> None:
    reward = load_custom(f"{file}:waits", Limits(60.0))
    folder = tmp_path / "calls"
    folder.mkdir()
    import threading

    def send() -> None:
        for pid in _pids(folder)[::-1]:
            os.kill(pid, number)

    sender = threading.Thread(target=send)
    sender.start()
    assert reward.score([_input(str(folder))])[0].score == 1.0
    sender.join()
    assert len(os.listdir(folder)) == 2
    reward.close()
