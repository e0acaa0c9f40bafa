"""PPO steps whose episodes have several contexts, led by rollout functions.

A context is one sequence for the models. What they compute is compared with transformers, context
by context; advantages with loops in this file.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from mrlhf.data.tokenizer import load_tokenizer
from tests.dist.ppo_runs import (
    REWARD_MODEL,
    TP2_PP2,
    Runs,
    Scenario,
    assert_close,
    assert_engine_and_trainer_agree,
    assert_same_on_every_layout,
)
from tests.oracle import plain_tables

_LEADS = [
    "data.chat_template=ROOT/chat.jinja",
    "data.max_prompt_length=10",
    "data.max_response_length=10",
    "reward.terms=[{name: environment}, {name: exact_match}]",
    "reward_model=null",
    "algorithm.use_kl_in_reward=false",
]
_STOP_IDS = (2, *range(4, 16))
_SPLIT = [
    *_LEADS,
    "data.chat_template=ROOT/forgets.jinja",
    "data.max_response_length=12",
    "rollout.environment=ROOT/episodes.py:Asks",
    "rollout.max_turn_tokens=4",
    f"rollout.stop_token_ids={[*_STOP_IDS[1:]]}",
    "rollout.on_rewrite=split",
    f"reward_model={{path: ROOT/{REWARD_MODEL}}}",
    "reward.terms=[{name: environment}, {name: reward_model, weight: 0.5}]",
]
_SHARED = [*_LEADS, "rollout.environment=ROOT/episodes.py:shared"]
_OWN = [*_LEADS, "rollout.environment=ROOT/episodes.py:own"]
_TP2_DP2 = ["actor.tp=2", "actor.micro_batch_tokens=24"]
_CP2_DP2 = ["actor.cp=2", "rollout.tp=2", "critic.share_prompts=true"]

WIDE = Scenario("shared dp4", [*_SHARED, "critic.pp=2", "critic.micro_batch_tokens=20"])
DEEP = Scenario("shared tp2 pp2", [*_SHARED, *TP2_PP2, "rollout.tp=2"])
MIXED = Scenario("shared tp2 dp2", [*_SHARED, *_TP2_DP2])
LONG = Scenario("shared cp2 dp2", [*_SHARED, *_CP2_DP2])
GRPO = ["algorithm.adv_estimator=grpo", "critic=null"]
OWN_WIDE = Scenario("own", [*_OWN, *GRPO])
OWN_DEEP = Scenario("own tp2 pp2", [*_OWN, *GRPO, *TP2_PP2, "rollout.tp=4"])
OWN_GAE = Scenario("own gae", [*_OWN, *_TP2_DP2])

SPLIT = Scenario("split", _SPLIT)
SPLIT_DEEP = Scenario("split tp2 pp2", [*_SPLIT, *TP2_PP2, "rollout.tp=2"])
_PARTIAL = [
    *_SPLIT,
    "rollout.partial={over: 1.75, max_versions: 3, turn_cost: 2}",
    "algorithm.rollout_correction.rollout_is=token",
    "actor.optim.lr=0.003",
]
PARTS = Scenario("split, in parts", _PARTIAL)
PARTS_DEEP = Scenario("split, in parts, tp2 pp2", [*_PARTIAL, *TP2_PP2, "rollout.tp=2"])


def test_the_engine_and_the_trainer_agree(runs: Runs) -> None:
    assert_engine_and_trainer_agree(runs, without=(PARTS, PARTS_DEEP))
    for scenario in (PARTS, PARTS_DEEP):
        for step in runs.steps(scenario):
            assert step.metrics["training/rollout_probs_diff_max"] < 1e-5


def test_a_step_is_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, WIDE, DEEP, MIXED, LONG)
    assert_same_on_every_layout(runs, OWN_WIDE, OWN_DEEP)
    assert_same_on_every_layout(runs, SPLIT, SPLIT_DEEP)
    assert_same_on_every_layout(runs, PARTS, PARTS_DEEP)


def test_episodes_of_several_contexts_go_on_with_later_weights(runs: Runs) -> None:
    first, second = runs.steps(PARTS)
    assert first.metrics["partial/open_groups"] > 0 and first.metrics["staleness/max"] == 0
    assert second.metrics["staleness/mixed"] > 0
    rollout = second.experience.rollout
    later = [
        rollout.versions[row, begin:].max() > rollout.versions[row, :begin].max()
        for row, episode in enumerate(rollout.episodes or ())
        for begin in episode.context_begins
    ]
    assert any(later)


def test_the_experience_is_what_the_models_say_of_each_context(runs: Runs) -> None:
    for scenario in (DEEP, OWN_GAE, SPLIT):
        experience = runs.steps(scenario)[0].experience
        rollout = experience.rollout
        assert rollout.episodes is not None
        assert any(len(episode.context_begins) > 0 for episode in rollout.episodes)
        logprobs, _ = plain_tables.evaluate(runs.load(), rollout)
        assert_close(experience.old_logprobs, logprobs)
        assert_close(rollout.rollout_logprobs, logprobs * rollout.loss_mask)
        assert_close(experience.ref_logprobs, plain_tables.evaluate(runs.load("-ref"), rollout)[0])
        assert_close(experience.values, plain_tables.token_values(runs.load("-critic"), rollout))


def test_what_trajectories_have_in_common_trains_once(runs: Runs) -> None:
    for step in runs.steps(WIDE):
        rollout = step.experience.rollout
        for row, episode in enumerate(rollout.episodes or ()):
            [begin] = episode.context_begins
            [prompt] = episode.context_prompts
            assert len(episode.turns) == 3 and episode.turns[1] == begin
            # The second begins with the first one's prompt and first turn.
            ids = rollout.response_ids[row]
            common = [*rollout.prompts.token_ids[row], *ids[: episode.turns[0]].tolist()]
            assert ids[begin : begin + len(common)].tolist() == common
            assert prompt > len(common)
            assert not rollout.loss_mask[row, begin : begin + prompt].any()
            assert rollout.loss_mask[row, : episode.turns[0]].all()


def test_a_shared_reward_is_that_of_the_episode(runs: Runs) -> None:
    for step in runs.steps(WIDE):
        experience = step.experience
        for row, episode in enumerate(experience.rollout.episodes or ()):
            assert episode.score == pytest.approx(float(experience.scores[row]))
            assert episode.further == {"turns": 3.0}
            [last] = experience.token_rewards[row].nonzero().tolist() or [[None]]
            assert episode.score == 0 or last == [episode.turns[-1] - 1]
        assert step.metrics["episodes/turns/mean"] == 3.0
        assert step.metrics["episodes/contexts/mean"] == 2.0


def test_own_rewards_are_compared_with_those_of_the_same_role(runs: Runs) -> None:
    for step in runs.steps(OWN_DEEP):
        experience = step.experience
        rollout = experience.rollout
        episodes = rollout.episodes
        assert episodes is not None
        compared = defaultdict(list)
        for row, episode in enumerate(episodes):
            begins = [0, *episode.context_begins]
            ends = [*episode.context_begins, rollout.shape[1]]
            assert episode.context_roles == ["answers", "answers", "asks"]
            rewards = [episode.turn_rewards[place] for place in (1, 2, 3)]
            assert episode.further["asks/reward"] == rewards[2]
            assert episode.further["answers/reward"] == pytest.approx(sum(rewards[:2]) / 2)
            for role, begin, end, reward in zip(
                episode.context_roles, begins, ends, rewards, strict=True
            ):
                compared[row // 2, role].append((row, begin, end, reward))

        wanted = torch.zeros(rollout.shape, dtype=torch.float64)
        for contexts in compared.values():
            rewards = torch.tensor([reward for *_, reward in contexts], dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for (row, begin, end, _), advantage in zip(contexts, advantages, strict=True):
                wanted[row, begin:end] = advantage
        assert_close(experience.advantages, wanted * rollout.loss_mask)
        assert experience.advantages.abs().max() > 0.5


def test_own_rewards_do_not_reach_other_contexts(runs: Runs) -> None:
    for step in runs.steps(OWN_GAE):
        experience = step.experience
        rollout = experience.rollout
        wanted = torch.zeros(rollout.shape)
        for row, episode in enumerate(rollout.episodes or ()):
            for place, (begin, end) in enumerate(
                zip([0, *episode.context_begins], [*episode.context_begins, None], strict=True)
            ):
                wanted[row, begin:end] = episode.turn_rewards[place + 1]  # gamma = lambda = 1
        assert_close(experience.returns, wanted * rollout.loss_mask)


def test_a_template_that_forgets_begins_another_context(runs: Runs) -> None:
    tokenizer = load_tokenizer(runs.root / "data" / "tokenizer")
    end = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    contexts = []
    for step in runs.steps(SPLIT):
        rollout = step.experience.rollout
        for row, episode in enumerate(rollout.episodes or ()):
            ids = rollout.response_ids[row].tolist()
            said = []
            for begin, stop in zip(episode.turn_begins, episode.turns, strict=True):
                has_end = ids[stop - 1] in _STOP_IDS
                said.append(tokenizer.decode(ids[begin : stop - has_end], False))
            asked = [rollout.prompts.text[row], *(f"{turn}+" for turn in range(1, len(said)))]
            for begin, prompt in zip(episode.context_begins, episode.context_prompts, strict=True):
                turn = episode.turn_begins.index(begin + prompt)  # its first
                earlier = zip(
                    asked, [text.split("-")[-1] + end for text in said[:turn]], strict=False
                )
                wanted = "".join(text for pair in earlier for text in pair) + asked[turn]
                got = tokenizer.decode(ids[begin : begin + prompt], skip_special_tokens=False)
                assert got == wanted
            contexts.append(len(episode.context_begins))
            # A turn without a - stays in its context.
            for turn, text in enumerate(said[:-1]):
                follows = episode.turns[turn] in episode.context_begins
                assert follows == ("-" in text)

    assert set(contexts) == {0, 1, 2}


def test_a_reward_model_reads_the_last_context(runs: Runs) -> None:
    for scenario in (SPLIT, SPLIT_DEEP):
        experience = runs.steps(scenario)[0].experience
        rollout = experience.rollout
        assert rollout.episodes is not None
        read = []
        for row, episode in enumerate(rollout.episodes):
            ids = rollout.response_ids[row][rollout.response_mask[row]].tolist()
            before = [] if episode.context_begins else rollout.prompts.token_ids[row]
            read.append(torch.tensor(before + ids[[0, *episode.context_begins][-1] :]))
        own = torch.tensor([float(episode.score or 0) for episode in rollout.episodes])
        assert_close(experience.scores, own + torch.tensor(runs.rewards(read)))
