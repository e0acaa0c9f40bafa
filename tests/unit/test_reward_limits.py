"""A user's reward function cannot take the trainer's memory, fill the machine with processes, leave
some behind, or run code in the trainer.
"""

import datetime
import decimal
import os
import socket
import time
from pathlib import Path

import pytest

from mrlhf.errors import RewardError
from mrlhf.rewards.custom import Limits, load_custom
from mrlhf.rewards.interface import RewardInput

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

FUNCTIONS = """
import json, os, pickle, socket, stat, subprocess, sys, time

def takes_memory(data_source, solution_str, ground_truth, extra_info):
    return len(bytearray(int(solution_str) * 10**6))

def child_takes_memory(data_source, solution_str, ground_truth, extra_info):
    program = f"print(len(bytearray({solution_str} * 10**6)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return {"score": done.returncode, "memory_error": "MemoryError" in done.stderr}

def starts_many(data_source, solution_str, ground_truth, extra_info):
    own_session = extra_info["own_session"]
    for _ in range(int(solution_str)):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=own_session)
        print(child.pid, flush=True)
    time.sleep(1000)

def leaves_some_behind(data_source, solution_str, ground_truth, extra_info):
    # A daemon: its parent ends at once, and it has a session of its own.
    program = (
        "import subprocess as s; n = s.DEVNULL; "
        "print(s.Popen(['sleep', '1000'], start_new_session=True, stdout=n, stderr=n).pid)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return int(done.stdout)

def score_of_dying(data_source, solution_str, ground_truth, extra_info):
    return int(open("/proc/self/oom_score_adj").read())

def type_names(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0, "pred": json.dumps(extra_info)}

class Evil:
    def __init__(self, path):
        self.path = path
    def __reduce__(self):
        return os.mkdir, (self.path,)

def writes_to_the_socket(data_source, solution_str, ground_truth, extra_info):
    for descriptor in range(3, 100):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                break
        except OSError:
            pass
    attack = {
        "pickle": pickle.dumps(Evil(extra_info["path"])) + b"\\n",
        "framed pickle": len(pickle.dumps(Evil(extra_info["path"]))).to_bytes(4, "big")
        + pickle.dumps(Evil(extra_info["path"])) + b"\\n",
        "half a message": b'["score", ',
        "deep": b"[" * 100_000 + b"\\n",
        "another form": b'{"score": 1}\\n',
        "unknown kind": b'["code", "x"]\\n',
        "no score": b'["score", [[1]]]\\n',
        "huge number": b'["score", ' + b"9" * 4000 + b"]\\n",
        "wrong error": b'["error", "x"]\\n',
    }[solution_str]
    os.write(descriptor, attack)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "scorer.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def load(file):
    opened = []

    def start(name, **limits):
        opened.append(load_custom(f"{file}:{name}", Limits(**limits)))
        return opened[-1]

    yield start
    for reward in opened:
        reward.close()


def score(reward, solution, **extra):
    return reward.score([RewardInput("sums", "3+4=", solution, "7", extra, 1)])[0]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_ended(pid):
    limit = time.monotonic() + 60
    while alive(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    return not alive(pid)


def test_memory_beyond_the_limit_is_refused_and_the_key_is_named(load):
    reward = load("takes_memory", memory_mb=400)
    assert score(reward, "100").score == 1e8
    with pytest.raises(RewardError, match=r"raised MemoryError.*reward\.memory_mb.*solution '600'"):
        score(reward, "600")
    assert score(reward, "100").score == 1e8  # the process serves on


def test_the_limit_holds_for_each_process_that_the_function_starts(load):
    reward = load("child_takes_memory", memory_mb=400)
    assert score(reward, "100").score == 0
    result = score(reward, "600")
    assert result.score != 0 and result.further == {"memory_error": 1.0}


def test_without_a_limit_memory_is_as_large_as_it_is(load):
    assert score(load("takes_memory"), "600").score == 6e8


@pytest.mark.parametrize("own_session", [False, True])
def test_too_many_processes_are_stopped_all(load, own_session):
    reward = load("starts_many", max_processes=5)
    with pytest.raises(
        RewardError, match=r"more than 5, and was stopped; reward\.max_processes"
    ) as e:
        score(reward, "8", own_session=own_session)
    pids = [int(word) for word in str(e.value).rpartition("it printed: ")[2].split(" | ")]
    assert len(pids) >= 4  # the last one may be seen before its number is printed
    assert all(has_ended(pid) for pid in pids)


def test_as_many_processes_as_allowed_are_left_alone(load):
    reward = load("starts_many", max_processes=9, timeout_s=5.0)
    with pytest.raises(RewardError, match="took more than 5 s") as e:
        score(reward, "8", own_session=False)
    pids = [int(word) for word in str(e.value).rpartition("it printed: ")[2].split(" | ")]
    assert len(pids) == 8
    assert all(has_ended(pid) for pid in pids)


def test_what_a_function_leaves_behind_ends_with_the_reward(load, monkeypatch):
    reward = load("leaves_some_behind")
    pid = int(score(reward, "1").score)
    assert alive(pid)

    # On a busy machine the worker gets the processor as soon as its connection closes, and ends.
    worker = reward._process._popen.pid
    close = socket.socket.close

    def close_and_pause(connection):
        close(connection)
        assert has_ended(worker)

    monkeypatch.setattr(socket.socket, "close", close_and_pause)
    reward.close()
    assert has_ended(pid)


def test_the_kernel_ends_the_function_before_the_trainer(load):
    assert score(load("score_of_dying"), "1").score == 1000


def test_values_that_json_does_not_have_arrive_as_text(load):
    extra = {
        "day": datetime.date(2024, 5, 1),
        "price": decimal.Decimal("1.50"),
        "list": [1, 2.5, None, {"a": True}],
        "text": "ä \u2028 \n",
    }
    answer = score(load("type_names"), "1", **extra).answer
    for part in ('"day": "2024-05-01"', '"price": "1.50"', '[1, 2.5, null, {"a": true}]'):
        assert part in answer
    assert '"text": "\\u00e4 \\u2028 \\n"' in answer


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ("pickle", "sent what is no answer"),
        ("framed pickle", "sent what is no answer"),
        ("half a message", "took more than 2 s"),
        ("deep", "sent what is no answer"),
        ("another form", "sent what is no answer"),
        ("unknown kind", "sent what is no answer"),
        ("wrong error", "sent what is no answer"),
        ("no score", "is no number"),
        ("huge number", "returned inf"),
    ],
)
def test_whatever_the_function_sends_no_code_of_it_runs_in_the_trainer(
    load, tmp_path, attack, message
):
    reward = load("writes_to_the_socket", timeout_s=2.0 if attack == "half a message" else 60.0)
    with pytest.raises(RewardError, match=message):
        score(reward, attack, path=str(tmp_path / "made by evil"))
    assert os.listdir(tmp_path) == []
