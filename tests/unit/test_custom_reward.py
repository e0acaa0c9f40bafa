"""Users' reward functions work, and whatever goes wrong in them is reported and stopped."""

import datetime
import decimal
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrlhf.errors import RewardError, UserTraceback
from mrlhf.rewards.custom import CustomReward, Limits, load_custom
from mrlhf.rewards.interface import RewardInput, Scored
from tests.leftovers import assert_all_end, is_alive

ROOT = Path(__file__).resolve().parents[2]

FUNCTIONS = """
import json, os, re, sys, time
from fractions import Fraction
print("imported")
torch_loaded = "torch" in sys.modules

def good(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def detailed(solution_str, **rest):
    return {"score": Fraction(1, 2), "length": len(solution_str), "note": "text", "exact": True,
            "tokens": rest["extra_info"].get("response_tokens"), "keys": len(rest["extra_info"])}

def answers(data_source, solution_str, ground_truth, extra_info):
    pred = {"long": "a" * 300, "none": None}.get(solution_str, solution_str)
    return {"score": 1, "pred": pred, "acc": True}

def answers_a_number(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1, "pred": Fraction(solution_str)}

def process(data_source, solution_str, ground_truth, extra_info):
    print("scoring", solution_str)
    return {"score": 0, "pid": os.getpid(), "torch": torch_loaded}

def fails_on_7(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "7":
        print("about to fail")
        return {}["missing"]
    return 1

def loops(data_source, solution_str, ground_truth, extra_info):
    while solution_str == "7":
        pass
    return 1

def hangs_in_c(data_source, solution_str, ground_truth, extra_info):
    print("begun")
    return re.match("(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock throughout

def returns_extra(data_source, solution_str, ground_truth, extra_info):
    return extra_info["value"]

def places(solution_str, **rest):
    return {"score": 1, "token_positions": [(Fraction(2), 0.5)], "character_positions": ((0, 2),)}

def returns_the_answer(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0, "pred": repr(ground_truth).strip("'")}

class TwoLines:
    def __repr__(self):
        return "two\\n   lines"

VALUES = {"complex": 1j, "huge": 10**400, "lines": TwoLines()}

def returns_a_value(data_source, solution_str, ground_truth, extra_info):
    return VALUES[solution_str]

def type_names(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0, "pred": json.dumps(extra_info)}

async def is_async(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def takes_two(solution_str, ground_truth):
    return 1

not_a_function = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "scorer.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def load(file):
    opened = []

    def start(name, timeout_s=20.0):
        opened.append(load_custom(f"{file}:{name}", Limits(timeout_s)))
        return opened[-1]

    yield start
    for reward in opened:
        reward.close()


def inputs(*solutions, **extra):
    return [
        RewardInput("sums", "3+4=", solution, "7", extra, len(solution)) for solution in solutions
    ]


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def test_scores_batches(load):
    reward = load("good")
    assert reward.score(inputs("7", "8", "7")) == [
        Scored(1.0, {}),
        Scored(0.0, {}),
        Scored(1.0, {}),
    ]
    for _ in range(3):  # no answers are due, so that messages may arrive together
        assert reward.score([]) == []
    assert reward.score(inputs("7")) == [Scored(1.0, {})]


def test_dicts_give_metrics_and_extra_info_tells_the_length(load):
    score, further, answer, placed = load("detailed").score(inputs("abc", level=3))[0]
    assert placed == ()
    assert score == 0.5 and answer is None
    assert further == {"length": 3.0, "exact": 1.0, "tokens": 3.0, "keys": 3.0}


def test_values_at_places_come_back_with_what_their_places_count(load):
    (found,) = load("places").score(inputs("abc"))
    assert found.placed == (("token", 2, 0.5), ("character", 0, 2.0))
    assert found.further == {"placed": 2.5}
    with pytest.raises(RewardError, match="at token 2 of a response of 2 tokens; places count fro"):
        load("places").score(inputs("ab"))


PAIRS = "token_positions"


@pytest.mark.parametrize(
    "value, message",
    [
        ({"positions": [[0, 1]]}, "name it token_positions or character_positions"),
        ({PAIRS: 3}, "returned 3.0 as 'token_positions'; return a list of pairs of a place"),
        ({PAIRS: [[1, 2, 3]]}, r"returned \[\[1.0, 2.0, 3.0\]\] as 'token_positions'"),
        ({PAIRS: [[0, "x"]]}, "as 'token_positions'; return a list of pairs.*solution '7'"),
        ({PAIRS: [[0.5, 1]]}, "0.5.* which is a whole number"),
        ({PAIRS: [[0, 1e16]]}, "at place 0 of 'token_positions' 1e.16; return a finite"),
        ({PAIRS: [[-1, 1]]}, "at token -1 of a response of 1 tokens"),
        ({"character_positions": [[1, 1]]}, "at character 1 of a response of 1 characters"),
    ],
)
def test_places_that_are_none_are_refused(load, value, message):
    with pytest.raises(RewardError, match=message):
        load("returns_extra").score(inputs("7", value={"score": 0, **value}))


def test_an_answer_comes_back_as_the_text_it_is(load):
    reward = load("answers")
    assert [found.answer for found in reward.score(inputs("18", "long", "none", ""))] == [
        "18",
        "a" * 300,
        None,
        "",
    ]
    assert reward.score(inputs("18")) == [Scored(1.0, {"acc": 1.0}, "18")]
    assert load("answers_a_number").score(inputs("1/2", "3")) == [
        Scored(1.0, {}, "1/2"),
        Scored(1.0, {}, "3"),
    ]


def test_one_process_serves_all_calls_and_is_not_this_one(load, caplog):
    import torch  # noqa: F401  (loaded here, it must not be there)

    reward = load("process")
    with caplog.at_level("INFO"):
        facts = [further for _ in range(2) for _, further, *_ in reward.score(inputs("1", "2"))]
    assert len({fact["pid"] for fact in facts}) == 1
    assert facts[0]["pid"] != os.getpid()
    assert facts[0]["torch"] == 0.0
    assert "printed: imported | scoring 1 | scoring 2" in caplog.text


def test_an_exception_names_function_file_row_and_cause(load, file):
    reward = load("fails_on_7")
    with pytest.raises(RewardError) as raised:
        reward.score(inputs("1", "7", "2"))

    message = str(raised.value)
    lines = FUNCTIONS.split("\n")
    line = lines.index('        return {}["missing"]') + 1
    for part in (
        "fails_on_7",
        str(file),
        f"KeyError: 'missing' (line {line})",
        "'sums'",
        "solution '7'",
        "about to fail",
    ):
        assert part in message
    assert "\n" not in message

    assert isinstance(raised.value.__cause__, UserTraceback)
    assert 'return {}["missing"]' in str(raised.value.__cause__)
    assert "worker.py" not in str(raised.value.__cause__)
    assert "start.py" not in str(raised.value.__cause__)

    # The rows after the failed one were not scored, and the process serves on.
    assert reward.score(inputs("3", "4", "5")) == [Scored(1.0, {})] * 3


def test_serves_again_after_a_hang_and_names_the_row_that_hung(load):
    reward = load("loops", timeout_s=5.0)
    with pytest.raises(RewardError, match="solution '7'"):
        reward.score(inputs("1", "2", "7", "3"))
    assert reward.score(inputs("1", "2")) == [Scored(1.0, {})] * 2


def test_a_long_traceback_keeps_its_head_and_its_tail():
    text = "".join(f"line {number}\n" for number in range(100)) + "x" * 1000
    lines = str(UserTraceback(text)).splitlines()
    assert lines[:3] == ["", "line 0", "line 1"]
    assert lines[20] == "  ... 64 lines are left out ..."
    assert lines[-2:] == ["line 99", "x" * 300]
    assert len(lines) == 39


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ("1.0", "is no number"),
        (None, "is no number"),
        ([1, 2], "is no number"),
        ({"points": 1}, 'without "score"'),
        ({"score": None}, "is no number"),
        ({"score": float("-inf")}, "returned -inf"),
        (1e30, "returned 1e\\+30; return a finite number from -1e\\+15 to 1e\\+15"),
        ({"score": -2e15}, "returned -2e\\+15"),
        ({"score": 1, "acc": 7}, "returned 7.0 as 'acc', .* return 1 or True"),
        ({"score": 1, "acc": -0.5}, "returned -0.5 as 'acc'"),
        ({"score": 1, "acc": float("nan")}, "returned nan as 'acc'"),
        ({"score": 1, "acc": "yes"}, "returned 'yes' as 'acc'"),
        ({"score": 1, "acc": [1]}, r"returned \[1\] as 'acc'"),
        ({"score": 1, "f1": float("inf")}, "returned inf as 'f1'; return a finite number"),
    ],
)
def test_what_is_no_finite_number_is_refused(load, value, message):
    reward = load("returns_extra")
    with pytest.raises(RewardError, match=message) as raised:
        reward.score(inputs("7", value=value))
    assert "returns_extra" in str(raised.value) and "solution '7'" in str(raised.value)
    assert "prompt '3+4='" in str(raised.value) and "\n" not in str(raised.value)
    assert reward.score(inputs("7", value=2)) == [Scored(2.0, {})]


def test_the_row_is_named_and_what_is_absent_is_left_out(load):
    reward = load("returns_extra")
    with pytest.raises(RewardError, match=r"solution '7', prompt '3\+4=', index 5 of split 'val'$"):
        reward.score(inputs("7", value="x", index=5, split="val"))
    value = {"score": True, "acc": None, "f1": float("nan"), "note": "text", "exact": 0.5}
    assert reward.score(inputs("7", value=value)) == [Scored(1.0, {"exact": 0.5})]
    assert reward.score(inputs("7", value={"score": 0, "acc": False})) == [Scored(0, {"acc": 0.0})]


@pytest.mark.parametrize("answer", [None, "7", ["7", "seven"], {"min": 1}, True])
def test_the_reference_answer_arrives_as_it_is(load, answer):
    row = RewardInput("sums", "3+4=", "7", answer, {}, 1)
    found = load("returns_the_answer").score([row])
    assert found == [Scored(0.0, {}, str(answer))]


@pytest.mark.parametrize(
    ("name", "shown"), [("complex", "1j"), ("huge", "1000.*"), ("lines", "two lines")]
)
def test_an_object_that_is_no_number_is_shown_in_the_line(load, name, shown):
    with pytest.raises(RewardError, match=f"returned {shown}, which is no number"):
        load("returns_a_value").score(inputs(name))


def test_values_that_json_does_not_have_arrive_as_text(load):
    extra = {
        "day": datetime.date(2024, 5, 1),
        "price": decimal.Decimal("1.50"),
        "list": [1, 2.5, None, {"a": True}],
        "text": "ä \u2028 \n",
    }
    answer = load("type_names").score(inputs("1", **extra))[0].answer
    for part in ('"day": "2024-05-01"', '"price": "1.50"', '[1, 2.5, null, {"a": true}]'):
        assert part in answer
    assert '"text": "\\u00e4 \\u2028 \\n"' in answer


def test_missing_names_and_files_name_their_neighbours(file, tmp_path):
    cases = [
        (f"{file}:god", r"no function 'god'; did you mean 'good'"),
        (f"{file}:zzzzzz", r"it has .*\bgood\b"),
        (f"{file}:not_a_function", r"not_a_function in .*\.py is of type int, and no"),
        (f"{file}:is_async", "is_async in .*scorer.py is an async function, which a call does not"),
        (f"{file}:takes_two", "must accept data_source, solution_str, ground_truth, extra_info"),
        (f"{file.with_name('scorers.py')}:good", r"no file .*did you mean .*scorer\.py\?"),
        (f"{tmp_path}/nothing.py:good", "relative to the working directory"),
        ("good", "write it as path/to/file.py:function"),
    ]

    for reference, message in cases:
        with pytest.raises(RewardError, match=message):
            load_custom(reference)


def test_a_file_that_fails_to_import(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nimport no_such_module\n")
    with pytest.raises(
        RewardError, match=r"cannot be imported: ModuleNotFoundError: .*no_such_module.* \(line 2\)"
    ) as raised:
        load_custom(f"{path}:f")
    assert "import no_such_module" in str(raised.value.__cause__)
    assert "user_code.py" not in str(raised.value.__cause__)

    path.write_text("def f(:\n")
    with pytest.raises(RewardError, match="SyntaxError"):
        load_custom(f"{path}:f")

    path.write_text("while True: pass\n")
    with pytest.raises(
        RewardError, match=r"took more than 0\.5 s and was stopped while its file was imported"
    ):
        CustomReward(path, "f", load_timeout_s=0.5)


def test_user_files_import_their_neighbours_and_our_rules(tmp_path):
    (tmp_path / "neighbour.py").write_text("BONUS = 0.25\n")
    path = tmp_path / "mine.py"
    path.write_text(
        "from neighbour import BONUS\nfrom mrlhf.rewards.rules import gsm8k\n"
        "def f(data_source, solution_str, ground_truth, extra_info):\n"
        "    return gsm8k(data_source, solution_str, ground_truth, extra_info) + BONUS\n"
    )
    reward = load_custom(f"{path}:f")
    assert reward.score(inputs("#### 7", "#### 8")) == [Scored(1.25, {}), Scored(0.25, {})]
    reward.close()


def test_a_file_written_again_within_a_second_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    for score in (1, 2):
        path.write_text(
            f"def f(data_source, solution_str, ground_truth, extra_info): return {score}\n"
        )
        os.utime(path, (1e9, 1e9))  # nor does the size tell the two texts apart
        reward = load_custom(f"{path}:f")
        assert reward.score(inputs("7"))[0].score == score
        reward.close()


BEGIN_A_CALL = """
reward._process.send([("d", "7", "7", {})])
while b"begun" not in os.pread(reward._process._output.fileno(), 1000, 0):
    time.sleep(0.01)
"""
TRAINER = """
import os, sys, time
sys.path.insert(0, {root!r})
from mrlhf.rewards.custom import Limits, load_custom
from mrlhf.rewards.interface import RewardInput, Scored
reward = load_custom({reference!r}, Limits(600.0))
{before}
print(reward._process._popen.pid, flush=True)
{then}
"""


@needs_proc
@pytest.mark.parametrize("end", ["returns", "raises", "killed idle", "killed in a call"])
def test_no_process_outlives_the_trainer(file, end, tmp_path):
    """A trainer script without `if __name__`, which ends in every way there is."""
    before = ""
    if end == "killed in a call":
        before = BEGIN_A_CALL
    then = {"returns": "", "raises": "raise SystemExit(1)"}.get(end, "time.sleep(1000)")

    script = tmp_path / "trainer.py"
    script.write_text(
        TRAINER.format(root=str(ROOT), reference=f"{file}:hangs_in_c", before=before, then=then)
    )

    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        pid = int(trainer.stdout.readline())
        if end.startswith("killed"):
            assert is_alive(pid)
            trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        assert_all_end(pid)


@needs_proc
def test_close_collects_the_process(load):
    reward = load("process")
    pid = int(reward.score(inputs("1"))[0][1]["pid"])
    reward.close()
    assert not Path(f"/proc/{pid}").exists()
    reward.close()
