"""GRPO runs whose responses a judge scores are the same after faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults import faults
from tests.faults.faults import Fault
from tests.faults.runs import QUEUE_AGAIN, Sequel, Setting, Undisturbed, assert_same_run
from tests.judge_server import JudgeServer, judge_server
from tests.ports import free_ports

# A run that goes on may know answers that the other paid for.
FREE = ("judge/prompt_tokens", "judge/completion_tokens", "judge/cache_hits")
JUDGING = "mrlhf.rollout.judging:RankJudge.score"
GRPO = ["algorithm.adv_estimator=grpo", "rollout.n=4", "algorithm.use_kl_in_reward=false"]


def by_address(inputs: Path, address: str) -> Setting:
    """The judge is a server, asked while responses are drawn; four digits are best."""
    judge = {
        "address": address,
        "model": "rule",
        "template": "{{ prompt }}|{{ response }}",
        "range": [0, 8],
        "unparsed": 0.25,
    }
    keys = [*GRPO, 'reward.terms=[{"name": "judge"}]', f"judge={json.dumps(judge)}"]
    keys += ["rollout.overlap=true", "algorithm.filter_groups.enable=false"]
    return Setting("judged", "ppo", ["--config", str(inputs / "ppo.yaml"), *keys])


def on_ranks(inputs: Path) -> Setting:
    """The judge is a model on the ranks, which draws two answers on each pair of responses."""
    judge = {
        "template": "{{ response }}-{{ other }}+",
        "compare": "pairs",
        "pattern": r"(\d)",
        "range": [0, 9],
        "unparsed": 0.5,
        "n": 2,
        "temperature": 1.0,
        "max_tokens": 4,
    }
    model = {"path": str(inputs / "judge"), "tp": 2, "max_prompt_tokens": 32}
    keys = [*GRPO, 'reward.terms=[{"name": "judge"}]', f"judge={json.dumps(judge)}"]
    keys += [f"judge_model={json.dumps(model)}"]
    return Setting("judged on ranks", "ppo", ["--config", str(inputs / "ppo.yaml"), *keys])


def test_a_model_on_the_ranks_judges_a_run_that_is_killed_and_interrupted(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(on_ranks(inputs), tmp_path / "run")
    ended = run.run(Fault(JUDGING, 3, "SIGKILL", rank=1))
    assert ended.codes[1] == -9, ended.text
    for fault in (Fault(JUDGING, 2, "SIGTERM", rank=0), Fault(faults.SCORING, 2, "SIGTERM")):
        ended = run.run(fault)
        assert ended.codes == [QUEUE_AGAIN] * 2, ended.text
    run.finish()
    whole = undisturbed(run.setting)
    assert_same_run(run, whole)
    rows = [json.loads(line) for line in (whole.directory / "metrics.jsonl").open()]
    # What one response wins another one loses, so the mean tells nothing.
    best = [row["critic/score/max"] for row in rows if "critic/score/max" in row]
    assert len(set(best)) > 1 and max(best) > 0.5


@contextmanager
def rule() -> Iterator[JudgeServer]:
    """A server that counts digits, is busy at times, and says nothing of use of the number 7."""

    def judge(message: str, number: int) -> str | tuple[int, dict[str, str]]:
        if number % 10 == 3:
            return 429, {"Retry-After": "0"}
        digits = sum(character.isdigit() for character in message.split("|")[1])
        return "what?" if "7" in message else f"So many. Rating: {digits}"

    with judge_server(judge) as server:
        yield server


def test_a_server_judges_a_run_that_is_killed_and_interrupted(inputs: Path, tmp_path: Path) -> None:
    with rule() as server:
        setting = by_address(inputs, server.address)
        whole = Sequel(setting, tmp_path / "whole")
        whole.finish()
        paid = len(server.asked)

        run = Sequel(setting, tmp_path / "run")
        ended = run.run(Fault(faults.SCORING, 3, "SIGKILL", rank=1))
        assert ended.codes[1] == -9, ended.text
        ended = run.run(Fault(faults.SCORING, 2, "SIGTERM", rank=0))
        assert ended.codes == [QUEUE_AGAIN] * 2, ended.text
        run.finish()
        assert_same_run(run, whole, FREE)
        # Two ranks may ask the same, which depends on who is first; what was known is not asked.
        assert len(server.asked) - paid < 1.2 * paid

    rows = [json.loads(line) for line in (whole.directory / "metrics.jsonl").open()]
    last = rows[-1]
    assert 0 < last["reward/judge"] < 1 and last["reward/judge"] == last["critic/score/mean"]
    assert 0 < last["judge/unparsed"] < 1
    assert any(row.get("judge/prompt_tokens", 0) > 0 for row in rows)
    assert sorted(file.name for file in (run.directory / "judge").iterdir()) == [
        "rank_0.jsonl",
        "rank_1.jsonl",
    ]


def test_a_server_that_is_not_there_is_said_once_before_anything_is_built(
    inputs: Path, tmp_path: Path
) -> None:
    address = f"http://127.0.0.1:{free_ports(1)[0]}/v1"
    run = Sequel(by_address(inputs, address), tmp_path / "run")
    ended = run.run()
    assert ended.codes == [2, 2], ended.text
    assert ended.text.count(f"judge.address {address} cannot be used") == 1
    assert "Traceback" not in ended.text
    assert not run.directory.exists()
