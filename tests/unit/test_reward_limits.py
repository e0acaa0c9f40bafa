"""A user's reward function cannot take the trainer's memory or leave processes behind."""

import datetime
import decimal
from pathlib import Path

import pytest

from mrlhf.errors import RewardError
from mrlhf.rewards.custom import Limits, load_custom
from mrlhf.rewards.interface import RewardInput
from tests.leftovers import assert_all_end, is_alive

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

FUNCTIONS = """
import json, os, subprocess, sys

def takes_memory(data_source, solution_str, ground_truth, extra_info):
    return len(bytearray(int(solution_str) * 10**6))

def child_takes_memory(data_source, solution_str, ground_truth, extra_info):
    program = f"print(len(bytearray({solution_str} * 10**6)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return {"score": done.returncode, "memory_error": "MemoryError" in done.stderr}

def leaves_some_behind(data_source, solution_str, ground_truth, extra_info):
    return subprocess.Popen(["sleep", "1000"]).pid

def leaves_some_behind_and_crashes(data_source, solution_str, ground_truth, extra_info):
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    os._exit(3)

def score_of_dying(data_source, solution_str, ground_truth, extra_info):
    return int(open("/proc/self/oom_score_adj").read())

def type_names(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0, "pred": json.dumps(extra_info)}
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


def test_what_a_function_leaves_behind_ends_with_the_reward(load):
    reward = load("leaves_some_behind")
    pid = int(score(reward, "1").score)
    assert is_alive(pid)
    reward.close()
    assert_all_end(pid)


def test_a_child_that_stays_ends_with_a_function_that_crashes(load):
    reward = load("leaves_some_behind_and_crashes")
    with pytest.raises(RewardError, match=r"ended its process \(exit code 3\)") as e:
        score(reward, "1")
    assert_all_end(int(str(e.value).rpartition("it printed: ")[2]))


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
