"""A judge behind an address, asked over HTTP: scores, tries, what is kept, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrlhf.config.reward import JudgeSection
from mrlhf.errors import ConfigError, RewardError
from mrlhf.rewards import chat_judge
from mrlhf.rewards.chat_judge import ChatJudge
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rewards.interface import RewardInput, Scored
from mrlhf.rewards.judge import Judge, win_rates
from tests.judge_server import JudgeServer, Reply, completion, judge_server
from tests.ports import free_ports

ASK = "Q {{ prompt }} A {{ response }} G {{ ground_truth }}"


def rows(*responses: str) -> list[RewardInput]:
    return [RewardInput("set", "two?", response, "2", {}, 4) for response in responses]


def judge_of(server: JudgeServer, **keys: object) -> ChatJudge:
    given = {"address": server.address, "model": "m", "template": ASK, "retries": 1} | keys
    return ChatJudge(JudgeSection.model_validate(given))


def test_it_scores_beside_a_rule_and_pays_for_no_answer_twice(tmp_path: Path) -> None:
    with judge_server(lambda message, _: f"No 9. Rating: {len(message)}") as server:
        judge = judge_of(server, range=[10, 30], temperature=0.5, n=2)
        judge.keep_answers(tmp_path / "judge" / "rank_0.jsonl")
        judge.reach()
        terms = [("judge", 2.0), ("exact_match", 1.0)]
        reward = RewardFunction(terms, judge=judge)
        result = reward.score(rows("2", "123456789", "2"))

        # "Q two? A 2 G 2" has 14 characters.
        assert result.metrics["judge"] == pytest.approx([0.2, 0.6, 0.2])
        assert result.scores == pytest.approx([1.4, 1.2, 1.4])
        assert result.metrics["judge/prompt_tokens"] == [7.0, 7.0, 0.0]
        assert result.metrics["judge/completion_tokens"] == [6.0, 6.0, 0.0]
        assert result.metrics["judge/cache_hits"] == [0.0, 0.0, 1.0]
        assert result.metrics["judge/unparsed"] == [0.0, 0.0, 0.0]
        assert sorted(asked["messages"][0]["content"] for asked in server.asked) == [
            "Q two? A 123456789 G 2",
            "Q two? A 2 G 2",
        ]
        settings = {"model": "m", "temperature": 0.5, "max_tokens": 512, "n": 2}
        assert all(settings.items() <= asked.items() for asked in server.asked)

        # Another rank, in a job that goes on; a line was left unfinished.
        with (tmp_path / "judge" / "rank_0.jsonl").open("a") as file:
            file.write('\n{"12')
        for _ in range(2):
            other = judge_of(server, range=[10, 30], temperature=0.5, n=2)
            other.keep_answers(tmp_path / "judge" / "rank_1.jsonl")
            (known,) = other.score(rows("2"))
            assert known.score == pytest.approx(0.2) and known.further["cache_hits"] == 1.0
            other.keep_answers(tmp_path / "judge" / "rank_0.jsonl")
            (new,) = other.score(rows("22"))
            assert new.score == pytest.approx(0.25)
        assert len(server.asked) == 3
        changed = judge_of(server, range=[10, 30], temperature=0.25)
        changed.keep_answers(tmp_path / "judge" / "rank_0.jsonl")
        changed.score(rows("2"))
        assert len(server.asked) == 4  # another question


def test_a_busy_server_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)
    monkeypatch.setattr(chat_judge, "time", clock)
    replies: list[Reply] = [(429, {"Retry-After": "3"}), (503, {}), b"<html>", completion([])]
    uncounted = b'{"choices": [{"message": {"content": "Rating: 10"}}], "usage": null}'
    replies += [(429, {"Retry-After": "900"}), uncounted]
    with judge_server(lambda _, number: replies[number - 1]) as server:
        (scored,) = judge_of(server, retries=5).score(rows("2"))
    assert scored.score == 1.0
    assert waits == [3.0, 1.0, 2.0, 4.0, 120.0]


@pytest.mark.parametrize(
    ("reply", "asked", "words"),
    [
        (b"<html>", 2, ["2 tries", "<html>"]),
        (b'{"error": "no such"}', 2, ["2 tries", "no such"]),
        ((500, {}), 2, ["2 tries", "500", "not now"]),
        ((400, {}), 1, ["1 tries", "400", "not now"]),
        (0.05, 2, ["2 tries"]),  # a byte at a time, past the limit
        (2.0, 2, ["2 tries", "timed out"]),
    ],
)
def test_a_server_that_fails_ends_the_run_in_one_line(
    reply: Reply, asked: int, words: list[str]
) -> None:
    with judge_server(lambda *_: reply) as server, pytest.raises(RewardError) as caught:
        judge_of(server, timeout_s=0.3).score(rows("2"))
    assert len(server.asked) == asked
    assert "\n" not in str(caught.value)
    for word in [*words, "judge.address", "judge.retries"]:
        assert word in str(caught.value)


def test_the_key_is_sent_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with judge_server(lambda *_: "Rating: 1") as server:
        with pytest.raises(ConfigError, match=r"judge.api_key_variable MY_KEY is not set"):
            judge_of(server, api_key_variable="MY_KEY")
        monkeypatch.setenv("MY_KEY", "a\nsecret")
        with pytest.raises(ConfigError, match=r"MY_KEY is not set to a key$"):
            judge_of(server, api_key_variable="MY_KEY")
        monkeypatch.setenv("MY_KEY", "a secret\n")
        judge = judge_of(server, api_key_variable="MY_KEY")
        judge.keep_answers(tmp_path / "rank_0.jsonl")
        judge.score(rows("2"))
        assert server.keys == ["Bearer a secret"]
        assert "secret" not in (tmp_path / "rank_0.jsonl").read_text()

        server.models_status = 404  # it lists no models
        judge.reach()
        server.models_status = 401
        with pytest.raises(ConfigError, match="401"):
            judge.reach()
    nowhere = f"http://127.0.0.1:{free_ports(1)[0]}/v1"
    with pytest.raises(ConfigError, match=f"judge.address {nowhere} cannot be used .* refused"):
        judge_of(JudgeServer(lambda *_: "", nowhere)).reach()


@pytest.mark.parametrize(
    ("keys", "answer", "score"),
    [
        ({}, "Rating: 1 at first, then Rating: 5.5", 0.5),
        ({}, "Rating: 11", None),
        ({}, "", None),
        ({"range": [10, 1]}, "Rating: 10", 0.0),
        ({"range": [-1, 1], "pattern": r"(?:is|=) \(?(-?\d)"}, "it is (-1)", 0.0),
        ({"verdicts": {"Good": 2, "bad": -1}, "pattern": r"\[\[(\w+)\]\]"}, "[[GOOD]]", 2.0),
        ({"verdicts": {"Good": 2, "bad": -1}, "pattern": r"\[\[(\w+)\]\]"}, "[[so]]", None),
    ],
)
def test_verdicts(keys: dict[str, object], answer: str, score: float | None) -> None:
    given = {"template": ASK, **keys}
    (row,) = rows("2")
    strict = Judge(JudgeSection.model_validate(given))
    lenient = Judge(JudgeSection.model_validate(given | {"unparsed": -7.0}))
    if score is None:
        with pytest.raises(
            RewardError, match=r"no verdict in the judge's answer .* judge.unparsed"
        ):
            strict.read([answer], row)
        assert lenient.read([answer], row)[:2] == (-7.0, {"unparsed": 1.0})
    else:
        assert strict.read([answer, answer], row)[:2] == (score, {"unparsed": 0.0})
        assert lenient.read([answer, "x"], row).score == pytest.approx((score - 7) / 2)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"template": "{{ response"}, "judge.template jinja2"),
        ({"template": ""}, "judge.template nothing response"),
        ({"template": "{{ prompt }}"}, "judge.template prompt response"),
        ({"template": "{{ response }} {{ answer }}"}, "judge.template answer ground_truth"),
        ({"pattern": r"\d+"}, r"judge.pattern \d+ one group"),
        ({"pattern": r"(\d)(\d)"}, r"judge.pattern (\d)(\d) one group"),
        ({"pattern": r"([0-9]"}, "judge.pattern regular expression unterminated"),
    ],
)
def test_it_is_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Judge(JudgeSection.model_validate({"template": ASK} | keys))
    for word in words.split():
        assert word in str(caught.value).replace("\\\\", "\\")


def test_a_template_that_fails_names_the_response() -> None:
    judge = Judge(JudgeSection(template="{{ extra_info.missing }} {{ response }}"))
    with pytest.raises(RewardError, match=r"judge.template fails: .*missing.* solution '2'"):
        judge.message(rows("2")[0])
    assert json.loads(Judge(JudgeSection(template="{{ response | tojson }}")).message(rows("2")[0]))


def test_a_score_is_the_share_of_comparisons_that_are_won() -> None:
    # 0 beats 1 whatever the order; the judge prefers the first place between 0 and 2.
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    verdicts = [1.0, 0.0, 1.0, 1.0, 0.25, 0.5]
    unparsed = [0.0, 0.0, 0.0, 0.5, 0.0, 1.0]
    given = [Scored(x, {"unparsed": y}) for x, y in zip(verdicts, unparsed, strict=True)]
    found = win_rates(4, pairs, given)
    # Of 2: 0 and 1 against 0, then 0.75 and 0.5 against 1.
    assert [each.score for each in found] == [0.75, 0.1875, 0.5625, 0.5]
    assert [each.further["unparsed"] for each in found] == [0.125, 0.25, 0.375, 0.0]


def test_a_message_of_a_comparison_shows_both() -> None:
    keys = {"template": "{{ response }} or {{ other }}?", "compare": "pairs"}
    one, other = rows("2", "3")
    assert Judge(JudgeSection.model_validate(keys)).message(one, other) == "2 or 3?"
    with pytest.raises(ConfigError, match=r"judge\.template names other, response; it should name"):
        Judge(JudgeSection.model_validate({**keys, "compare": "none"}))
