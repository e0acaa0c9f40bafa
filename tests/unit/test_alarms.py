"""Each alarm is raised by a recorded run that has its failure, and none by runs without one."""

import itertools
import json
import random
import re
from pathlib import Path
from statistics import fmean

import pytest

from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.config.tree import nodes
from mrlhf.metrics.tally import standard_errors
from mrlhf.run.alarms.history import History
from mrlhf.run.alarms.rules import PAGE, RULES, Rule
from mrlhf.run.alarms.watch import Watch, write_alarms
from tests.recordings.record import FAILING, HEALTHY, KEPT

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "recordings"


def recorded(name):
    text = (RECORDINGS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def high(history):
    value = history.now("x")
    return f"x is {value:g}" if value is not None and value > 1 else None


HIGH = Rule("high", "warning", high, "it is warm", "x.max")


def raised(values):
    watch = Watch((HIGH,))
    return [step for step, x in enumerate(values, 1) for _ in watch.look(step, {"x": x})]


@pytest.mark.parametrize("name", FAILING)
def test_a_recorded_failure_raises_its_alarm_once(name):
    alarms = [alarm for alarm in Watch().replay(recorded(name)) if alarm.name == name]
    assert len(alarms) == 1, alarms
    assert re.search(r"\d", alarms[0].message) and "\n" not in alarms[0].line


@pytest.mark.parametrize("name", FAILING)
def test_the_alarm_of_a_recording_has_these_words(name):
    alarm = next(alarm for alarm in Watch().replay(recorded(name)) if alarm.name == name)
    written = (RECORDINGS / "alarms.txt").read_text(encoding="utf-8").splitlines()
    assert f"alarm {name} at step {alarm.step}: {alarm.message}" in written


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_none(name):
    assert len(recorded(name)) >= 16
    assert [alarm.line for alarm in Watch().replay(recorded(name))] == []


def test_a_learning_rate_of_zero_is_meant_where_the_head_has_its_own():
    def alarms(head_lr):
        found = Watch().look(1, {"rm/lr": 0.0, "rm/head_lr": head_lr})
        return [alarm.name for alarm in found]

    assert alarms(head_lr=0.01) == []
    assert alarms(head_lr=0.0) == ["zero_learning_rate"]


def test_at_least_ten_healthy_runs_and_every_rule_has_a_failing_one():
    assert len(HEALTHY) >= 10
    assert {rule.name for rule in RULES} == set(FAILING)
    files = {path.stem for path in RECORDINGS.glob("*.jsonl")}
    assert files == set(FAILING) | set(HEALTHY)


def test_recordings_keep_every_metric_that_a_rule_reads():
    asked = set()

    class Spy(History):
        def recent(self, name, count):
            asked.add(name)
            return super().recent(name, count)

        def first(self, name):
            asked.add(name)
            return super().first(name)

    for name in FAILING:
        history = Spy()
        for row in recorded(name):
            history.add(row["step"], row)
            for rule in RULES:
                rule.sign(history)
    # No recorded run has a head with a learning rate of its own, or trains a critic alone.
    unkept = {name for name in asked if not name.startswith(KEPT)}
    roles = ("actor", "critic", "dpo", "rm", "sft", "values")
    assert unkept <= {f"{role}/head_lr" for role in roles} | {"values/lr", "values/grad_norm"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} {rule.key}")
def test_key_and_section_of_the_page_exist(rule):
    known = {key for root in (PPOConfig, SFTConfig, RewardModelConfig) for key in nodes(root)}
    assert rule.key in known
    page, anchor = rule.link.split("#")
    headings = re.findall(r"^### (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert page == PAGE
    assert anchor in {re.sub(r"[^a-z -]", "", text.lower()).replace(" ", "-") for text in headings}


# The prefix of what is measured, its values with their standard error in order, what else the run
# measures; the key to change, or "" without an alarm.
FAR = {"actor/ppo_kl": 0.9}
IN_REWARD = {"actor/ppo_kl": 0.01, "actor/reward_kl_penalty": 0.4, "critic/score/mean": 1.0}
IN_LOSS = {"actor/kl_loss": 0.4, "critic/score/mean": 1.0}
FALLS = {
    "spoiled": (
        "val/t/acc@1",
        [0.04, 0.86, 0.63, 0.27],
        0.05,
        IN_REWARD,
        "algorithm.kl_ctrl.kl_coef",
    ),
    "in the loss": ("val/t/acc@1", [0.04, 0.86, 0.27], 0.05, IN_LOSS, "actor.kl_loss_coef"),
    "no KL": (
        "val/t/acc@1",
        [0.8, 0.3],
        0.05,
        {"critic/score/mean": 1.0},
        "algorithm.use_kl_in_reward",
    ),
    "large steps": ("val/t/acc@1", [0.8, 0.3], 0.05, IN_REWARD | FAR, "actor.optim.lr"),
    "sampled": ("val_sampled/t/acc@1", [0.8, 0.3], 0.05, IN_LOSS, "actor.kl_loss_coef"),
    "both ends": ("test/t/acc@1", [0.8, 0.3], 0.05, IN_LOSS, "actor.kl_loss_coef"),
    "reward": ("val/t/reward_mean", [-3.0, 2.0, -1.0], 0.5, IN_LOSS, "actor.kl_loss_coef"),
    "loss": ("val/loss", [2.0, 1.0, 1.5], 0.05, {"sft/loss": 0.1}, "trainer.total_steps"),
    "pairs": ("val/accuracy", [0.5, 0.9, 0.6], 0.03, {"rm/loss": 0.1}, "trainer.total_steps"),
    "few rows": ("val/t/acc@1", [0.4, 0.9, 0.7], 0.14, IN_LOSS, ""),
    "a little": ("val/t/acc@1", [0.4, 0.9, 0.85], 0.03, IN_LOSS, ""),
    "better": ("val/loss", [2.0, 1.0, 0.5], 0.01, {"sft/loss": 0.1}, ""),
    "recovered": ("val/t/acc@1", [0.9, 0.3, 0.9], 0.03, IN_LOSS, "actor.kl_loss_coef"),
}


@pytest.mark.parametrize("case", FALLS)
def test_held_out_results_that_fall_raise_an_alarm_with_the_key_that_helps(case):
    name, values, error, others, key = FALLS[case]
    watch = Watch()
    found = []
    for number, value in enumerate(values):
        step = 10 * number
        found += watch.look(step, {name: value, f"se/{name}": error, **(others if step else {})})
        found += [alarm for later in range(1, 10) for alarm in watch.look(step + later, others)]
    found = [alarm for alarm in found if alarm.name == "held_out"]

    assert [alarm.key for alarm in found] == ([key] if key else [])
    if key:
        assert name in found[0].message and f"after step {found[0].step}" in found[0].message
        best = max(values, key=lambda value: -value if name.endswith("loss") else value)
        assert f"{best:.3g} ±" in found[0].message
    on = [alarm for alarm in watch.on if alarm.name == "held_out"]
    assert bool(on) == (bool(key) and case != "recovered")


def test_noise_is_no_fall():
    noise = random.Random(7)
    for rows, share in itertools.product((2, 3, 8, 50), (0.0, 0.1, 0.5, 0.9)):
        for _ in range(20):
            watch = Watch()
            for step in range(20):
                right = [float(noise.random() < share) for _ in range(rows)]
                rewards = [noise.gauss(share, 1.0) for _ in range(rows)]
                values = {"val/t/acc@1": right, "val/u/reward_mean": rewards}
                means = {name: fmean(each) for name, each in values.items()}
                assert not watch.look(step, means | standard_errors(values)), (rows, share)


def test_a_result_of_few_rows_that_all_turn_wrong_is_told_by_enough_of_them():
    for rows, is_told in ((2, False), (50, True)):
        watch = Watch()
        found = []
        for step, right in enumerate((0.2, 1.0, 0.0)):
            values = [float(row < right * rows) for row in range(rows)]
            measured = {"val/t/acc@1": fmean(values), "critic/score/mean": 0.5}
            found += watch.look(step, measured | standard_errors({"val/t/acc@1": values}))
        assert [alarm.name for alarm in found] == ["held_out"] * is_told


def test_a_fall_is_told_once_and_an_old_spike_silences_no_alarm():
    watch = Watch()
    fallen = {"val/t/acc@1": 0.1, "se/val/t/acc@1": 0.01}
    kls = {"actor/ppo_kl": 0.01, "actor/kl_loss": 0.1}
    watch.look(0, {"val/t/acc@1": 0.9, "se/val/t/acc@1": 0.01})
    (first,) = watch.look(1, fallen | kls)
    assert (first.name, first.key) == ("held_out", "actor.kl_loss_coef")
    later = watch.look(2, fallen | kls | {"actor/ppo_kl": 0.5})
    assert [alarm.name for alarm in later] == ["kl_explosion"]

    found = []
    for step in range(3, 60):
        far = {"actor/kl_loss": 9.0} if step > 55 else {}
        found += watch.look(step, kls | far)
    assert "actor/kl_loss is 9" in found[-1].message


@pytest.mark.parametrize(("seconds", "steps"), [(0.1, 1200), (1.0, 120), (600.0, 5), (None, 5)])
def test_a_slow_replica_is_told_after_minutes(seconds, steps):
    for kind, role in (("slowest_replica", ""), ("slowest_update", "/sft")):
        row = {f"perf/{kind}{role}": 3.0, f"perf/{kind}_rank{role}": 1}
        row |= {} if seconds is None else {"timing_s/step": seconds}
        watch = Watch()
        raised = [alarm.step for step in range(1, steps + 3) for alarm in watch.look(step, row)]
        assert raised == [steps]


@pytest.mark.parametrize(
    ("measured", "key"),
    [
        ({"actor/ppo_kl": 3.0, "actor/reward_kl_penalty": 5.0}, "actor.optim.lr"),
        ({"actor/ppo_kl": 0.0, "actor/reward_kl_penalty": 5.0}, "algorithm.kl_ctrl.kl_coef"),
        ({"actor/kl_loss": 5.0}, "actor.kl_loss_coef"),
    ],
)
def test_a_policy_far_from_the_reference_names_what_holds_it(measured, key):
    watch = Watch()
    raised = [alarm for step in (1, 2, 3) for alarm in watch.look(step, measured)]
    assert [alarm.key for alarm in raised if alarm.name == "kl_explosion"] == [key]


def test_an_alarm_is_raised_when_it_begins_and_again_only_after_five_quiet_steps():
    assert raised([0, 2, 2, 2]) == [2]
    assert raised([2, 0, 0, 0, 0, 2, 2]) == [1]
    assert raised([2, 0, 0, 0, 0, 0, 2, 2]) == [1, 7]
    assert raised([2, None, None, None, None, None, 2]) == [1, 7]
    assert raised([float("nan"), float("inf"), 0]) == []


def test_an_alarm_that_is_on_is_known_until_it_ends():
    watch = Watch((HIGH,))
    for step, value in enumerate([2, 0, 0, 0, 0], 1):
        watch.look(step, {"x": value})
        assert [alarm.step for alarm in watch.on] == [1]
    watch.look(6, {"x": 0})
    assert watch.on == []


def test_a_resumed_run_has_the_alarms_of_its_earlier_steps(tmp_path):
    rows = recorded("clip_fraction")
    whole, resumed = Watch(), Watch()
    expected = whole.replay(rows)
    before = resumed.replay([{"step": 0, "val/loss": 2.0}, *rows[:3]])
    after = [alarm for row in rows[3:] for alarm in resumed.look(row["step"], row)]
    assert before + after == expected and resumed.on == whole.on

    file = tmp_path / "alarms.jsonl"
    write_alarms(file, [], replace=True)
    assert not file.exists()
    write_alarms(file, expected)
    write_alarms(file, expected, replace=True)
    (line, *others) = file.read_text(encoding="utf-8").splitlines()
    assert len(others) == len(expected) - 1
    fields = {"step", "name", "severity", "message", "cause", "key", "link"}
    assert set(json.loads(line)) == fields


def test_the_history_keeps_what_is_asked_for_in_little_memory():
    history = History()
    for step in range(1, 3001):
        history.add(step, {"x": step, "y": step if step < 10 else None})
    assert history.recent("x", 3) == [2998, 2999, 3000] and history.first("x") == [1, 2, 3]
    assert history.recent("y", 3) == [] and history.now("y") is None and history.count("y") == 9
    assert history.extremes("x") == (1, 3000)
    assert len(history._series["x"].recent) == 2048
