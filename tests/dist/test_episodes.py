"""Episodes of several turns, on one engine of two ranks and on two engines, against a slow loop.

The loop draws each turn with `transformers` from all tokens so far, plays the environment itself,
and writes what comes between two turns as literal text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mrlhf.batch import NO_VERSION
from tests.dist.episode_runs import (
    ENDS,
    FAILING,
    LAYOUTS,
    MOST_TOKENS,
    MOST_TOLD,
    MOST_TURNS,
    UIDS,
    N,
    draw_in_ranks,
)
from tests.dist.talk import ENVIRONMENT, FUNCTION, text_of, tokens_of
from tests.models.engines import hf_model
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("talk") / "talk.py"
    file.write_text(ENVIRONMENT + FUNCTION, encoding="utf-8")
    return run_ranks(2, draw_in_ranks, str(file))


def _play(model: Any, uid: int) -> tuple[list[int], list[int], list[bool], list[float]]:
    """Prompt, response, which of its tokens are drawn, and the reward of each turn."""
    first = f"<|user|>go {uid}<|end|>" if uid % 2 else ""
    prompt = tokens_of(f"<|tools|>note<|end|><|user|>say {uid}<|end|>{first}<|assistant|>")
    response: list[int] = []
    is_drawn: list[bool] = []
    sizes: list[int] = []

    for turn in range(MOST_TURNS):
        said: list[int] = []
        while len(response) < MOST_TOKENS and not (said and said[-1] in ENDS):
            logits = model(torch.tensor([prompt + response])).logits[0, -1, :100]
            said.append(int(logits.argmax()))
            response.append(said[-1])
            is_drawn.append(True)
        if said[-1] not in ENDS:
            break  # no room to end the turn
        size = len(text_of(said[:-1]))
        sizes.append(size)
        if size % 2:
            told = f"<|tool|>{('x' * (size % 5))[:MOST_TOLD]}"
            told += " [cut]" if size % 5 > MOST_TOLD else ""
        elif len(sizes) > uid % 4:
            break
        else:
            told = f"<|user|>{f'ok {size}'[:MOST_TOLD]} [cut]"
        between = tokens_of(f"{told}<|end|><|assistant|>")
        if turn + 1 == MOST_TURNS or len(response) + len(between) >= MOST_TOKENS:
            break
        response += between
        is_drawn += [False] * len(between)

    return prompt, response, is_drawn, [size / 2 for size in sizes]


def test_greedy_episodes_are_those_of_a_slow_loop(ranks: list[dict[str, Any]]) -> None:
    model = hf_model("llama")
    turns = []
    for name in LAYOUTS:
        found = ranks[0][f"{name}, greedy"]
        for row, uid in enumerate(UIDS):
            episode = found["episodes"][row]
            if uid in FAILING:
                continue
            prompt, response, is_drawn, rewards = _play(model, uid)
            assert found["prompts"][row] == prompt
            assert found["responses"][row] == response
            assert found["drawn"][row] == is_drawn

            assert episode.turn_rewards == rewards
            assert episode.score == 2 * sum(rewards) and episode.further == {"turns": len(rewards)}
            assert episode.turns[-1] == len(response) or not is_drawn[-1]
            turns_of_row = zip(episode.turn_begins, episode.turns, strict=True)
            in_turns = [token for begin, end in turns_of_row for token in range(begin, end)]

            assert in_turns == [token for token, drawn in enumerate(is_drawn) if drawn]
            turns.append(len(episode.turns))
    assert max(turns) == MOST_TURNS and len({*turns}) > 1


def test_a_function_that_does_the_same_draws_the_same(ranks: list[dict[str, Any]]) -> None:
    led, wanted = (ranks[0][name] for name in ("function", "tp 2, greedy"))
    alive = [row for row, uid in enumerate(UIDS) if uid not in FAILING]
    for what in ("prompts", "responses", "drawn", "stopped"):
        assert led[what] == [wanted[what][row] for row in alive], what
    width = led["logprobs"].shape[1]
    np.testing.assert_allclose(
        led["logprobs"], wanted["logprobs"][alive][:, :width], rtol=2e-4, atol=2e-5
    )
    for mine, row in zip(led["episodes"], alive, strict=True):
        other = wanted["episodes"][row]
        assert mine.turns == other.turns and not mine.context_begins
        assert mine.tools == other.tools and mine.errors == other.errors
    assert led["responses"] == ranks[1]["function"]["responses"]


def test_log_probabilities_are_those_of_the_whole_episode(ranks: list[dict[str, Any]]) -> None:
    model = hf_model("llama")
    for kind in ("greedy", "sampled"):
        found = ranks[0][f"tp 2, {kind}"]
        for row, (prompt, response) in enumerate(
            zip(found["prompts"], found["responses"], strict=True)
        ):
            drawn = torch.tensor(found["drawn"][row])
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            wanted = logits.log_softmax(dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            got = torch.from_numpy(found["logprobs"][row, : len(response)])
            torch.testing.assert_close(got, torch.where(drawn, wanted, 0.0), rtol=2e-4, atol=2e-5)


def test_layouts_draw_the_same_episodes(ranks: list[dict[str, Any]]) -> None:
    for kind in ("greedy", "sampled"):
        one, two = (ranks[0][f"{name}, {kind}"] for name in LAYOUTS)
        for what in ("prompts", "responses", "drawn", "stopped"):
            assert one[what] == two[what]
        for mine, other in zip(one["episodes"], two["episodes"], strict=True):
            assert mine.turn_rewards == other.turn_rewards and mine.score == other.score
        assert one["responses"] == ranks[1][f"tp 2, {kind}"]["responses"]
    sampled = ranks[0]["tp 2, sampled"]["responses"]
    # Of uids 3 and 9 all four are alike.
    assert len({tuple(row) for row in sampled}) == len(sampled) - 3


def test_one_rank_hears_of_each_episode_that_has_ended(ranks: list[dict[str, Any]]) -> None:
    for name in LAYOUTS:
        shares = [found[f"{name}, sampled"]["heard"] for found in ranks]
        assert sorted(shares[0] + shares[1]) == list(range(N * len(UIDS)))
        assert abs(len(shares[0]) - len(shares[1])) <= N


def test_a_failed_episode_does_not_train(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["two replicas, sampled"]
    for row, episode in enumerate(found["episodes"]):
        uid = UIDS[row // N]
        assert bool(episode.failure) == (uid in FAILING)
        if uid in FAILING:
            assert not any(found["drawn"][row]) and episode.score is None

        if uid == 3:
            assert episode.failure == "reset raised ValueError: nothing to say"
        if uid == 9:
            assert episode.failure.endswith("more than data.max_prompt_length 32")
            assert len(found["prompts"][row]) <= 32 and episode.prompt_ids is None

        if uid in (3, 9):
            assert found["responses"][row] == [0]
            assert episode.turn_begins == episode.turns == []
        if uid == 5:
            assert episode.failure.startswith("its answer cannot be written: ")
            assert len(found["responses"][row]) > 1
            assert episode.turn_begins[0] == 0 < episode.turns[0]  # who wrote what is still known
    assert found["versions"] == [NO_VERSION, 5]
    assert found["metrics"]["episodes/failed"] == 0.5


def test_ranks_that_are_done_need_not_wait_for_tools(ranks: list[dict[str, Any]]) -> None:
    assert [found["stopped"] for found in ranks] == [("the time is over", [0])] * 2


def test_rewards_of_turns_stand_at_their_ends(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["tp 2, sampled"]
    for row, episode in enumerate(found["episodes"]):
        for end, reward in zip(episode.turns, episode.turn_rewards, strict=False):
            assert found["turn rewards"][row, end - 1] == (0.0 if episode.failure else reward)
    counted = [episode for episode in found["episodes"] if not episode.failure]
    total = sum(sum(episode.turn_rewards) for episode in counted)
    assert float(found["turn rewards"].sum()) == total > 0


def test_a_conversation_is_not_computed_again(ranks: list[dict[str, Any]]) -> None:
    metrics = ranks[0]["tp 2, greedy"]["metrics"]
    assert metrics["episodes/turns/max"] == MOST_TURNS
    assert metrics["rollout/prefix_hit_rate"] > 0.3  # each prompt is greedy and of one sample


@pytest.mark.parametrize("kind", ["partial", "partial split"])
def test_episodes_in_parts_are_those_drawn_at_once(ranks: list[dict[str, Any]], kind: str) -> None:
    steps = ranks[0][kind]
    for step in steps:
        partly, at_once = step["partial"], step["whole"]
        for what in ("prompts", "responses", "drawn", "stopped"):
            assert partly[what] == at_once[what]
        width = partly["logprobs"].shape[1]
        wanted = at_once["logprobs"][:, :width]
        np.testing.assert_allclose(partly["logprobs"], wanted, rtol=2e-4, atol=2e-5)
        for mine, other in zip(partly["episodes"], at_once["episodes"], strict=True):
            assert replace(mine, waited_s=0.0) == replace(other, waited_s=0.0)
        # Those of uid 3 fail, so others are taken, and they are dropped.
        assert len(partly["episodes"]) == 2 * N
        assert not any(episode.failure for episode in partly["episodes"])

    if kind == "partial":
        assert {step["left"] for step in steps} == {1, 2}
        for step in steps:
            assert step["failed"] == pytest.approx((2 - step["left"]) / (4 - step["left"]))

    assert max(step["mixed"] for step in steps) > 0.4
    # Only episodes that have begun and not ended have an environment.
    assert 0 < max(step["open episodes"] for step in steps) <= 2 * N
    episodes = [episode for step in steps for episode in step["partial"]["episodes"]]
    assert any(episode.context_begins for episode in episodes) == (kind == "partial split")
    assert any(episode.tools.get("error") for episode in episodes) == (kind == "partial split")
