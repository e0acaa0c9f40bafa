"""PPO steps whose samples are drawn, ended or scored in other ways.

Each scenario stands above the tests of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.rollout.early_scores import EarlyScores
from tests.dist.ppo_runs import (
    DP4,
    TP2_PP2,
    WORLD_SIZE,
    Runs,
    Scenario,
    assert_close,
    assert_engine_and_trainer_agree,
    assert_same_on_every_layout,
)

LETTERS = ["reward.terms=[{name: CUSTOM:letters, weight: 2.0}]", "reward_model=null"]


_PARTIAL = [
    "rollout.partial={over: 1.75, max_versions: 3}",
    "rollout.stop_token_ids=[4,5,6,7,8,9,10,11,12,13,14,15]",
    "data.max_response_length=10",
    "algorithm.rollout_correction.rollout_is=token",
    "actor.optim.lr=0.003",
]
WIDE = Scenario("partial dp4", [*_PARTIAL, *DP4])
DEEP = Scenario("partial tp2 pp2", [*_PARTIAL, *TP2_PP2, "rollout.tp=2"])
MIXED = Scenario("partial tp2 dp2", [*_PARTIAL, "actor.tp=2"])
LONG = Scenario("partial cp2 dp2", [*_PARTIAL, "actor.cp=2", "rollout.tp=2"])
ONE = Scenario("partial tp4", [*_PARTIAL, "actor.tp=4", "rollout.tp=4"])
PARTIAL = (WIDE, DEEP, MIXED, LONG, ONE)


def test_the_engine_and_the_trainer_agree(runs: Runs) -> None:
    of_several_versions = (*PARTIAL, PLACES_PARTIAL, LATE_PARTIAL, EARLY_PARTIAL)
    assert_engine_and_trainer_agree(runs, without=of_several_versions)
    for scenario in of_several_versions:
        for step in runs.steps(scenario):
            assert step.metrics["training/rollout_probs_diff_max"] < 1e-5


def test_partial_rollouts_are_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, *PARTIAL)


def test_tokens_of_older_versions_are_weighted(runs: Runs) -> None:
    first, second = runs.steps(WIDE)
    assert first.metrics["partial/open_groups"] == 6 and first.metrics["staleness/max"] == 0
    assert second.metrics["staleness/mixed"] > 0
    experience = second.experience
    rollout = experience.rollout
    assert experience.weights is not None
    ratio = (experience.old_logprobs - rollout.rollout_logprobs).exp()
    assert_close(experience.weights, ratio.clamp(max=2.0) * rollout.loss_mask)
    off = (ratio - 1).abs() * rollout.loss_mask
    assert off[rollout.versions == 1].max() < 1e-4
    assert off[rollout.versions == 0].max() > 1e-3


DYNAMIC = Scenario(
    "dynamic sampling",
    [
        "algorithm.filter_groups={enable: true, max_num_gen_batches: 3}",
        "data.gen_batch_size=6",
        "algorithm.adv_estimator=grpo",
        *LETTERS,
    ],
)


def test_dynamic_sampling_fills_the_batch_with_samples_that_differ(runs: Runs) -> None:
    for step in runs.steps(DYNAMIC):
        metrics = step.metrics
        pairs = step.experience.scores.view(-1, 2).tolist()
        differing = sum(one != other for one, other in pairs)
        assert len(step.experience.rollout) == 16
        assert 8 - differing == metrics["training/uninformative_groups"]
        assert 2 <= metrics["training/num_gen_batches"] <= 3
        assert metrics["training/generated_groups"] == 6 * metrics["training/num_gen_batches"]
        assert metrics["training/filtered_groups"] > 0


REFILL = Scenario(
    "refill with a reward model",
    [
        "algorithm.filter_groups={enable: true, max_num_gen_batches: 3}",
        "data.gen_batch_size=4",
        "algorithm.adv_estimator=remax",
    ],
)


def test_a_refill_has_the_weights_again_after_a_reward_model_had_the_memory(runs: Runs) -> None:
    for number, step in enumerate(runs.steps(REFILL)):
        rollout = step.experience.rollout
        assert step.metrics["training/num_gen_batches"] >= 2
        assert len(rollout) == 16
        assert (rollout.versions[rollout.loss_mask] == number).all()
        assert step.metrics["training/rollout_probs_diff_max"] < 1e-5
        assert step.metrics["critic/greedy_score/mean"] != 0.0


CUSTOM_REWARD = Scenario("custom reward", LETTERS)


def test_a_users_function_scores(runs: Runs) -> None:
    for number, step in enumerate(runs.steps(CUSTOM_REWARD), start=1):
        samples = runs.dumped(CUSTOM_REWARD, number)
        assert len(samples) == 16

        letters = [len(sample["response"]) / 10 for sample in samples]
        doubled = [2 * score for score in letters]
        assert [sample["score"] for sample in samples] == pytest.approx(doubled)
        assert_close(step.experience.scores, 2 * torch.tensor(letters))
        assert step.metrics["reward/letters"] == pytest.approx(sum(letters) / 16)

        digits = [sum(letter.isdigit() for letter in sample["response"]) for sample in samples]
        assert step.metrics["reward/letters/digits"] == pytest.approx(sum(digits) / 16)


def _all_early(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the engine wait until a response that has ended has its score."""
    add = EarlyScores.add

    def add_and_wait(early: EarlyScores, key: Any, *given: Any) -> None:
        add(early, key, *given)
        early._known[key][-1].evaluated.result()

    patch.setattr(EarlyScores, "add", add_and_wait)


OVERLAP = ["rollout.overlap=true"]
SLOW = ["reward.terms=[{name: CUSTOM:slow_letters}, {name: reward_model, weight: 0.5}]"]
ENDS = ["rollout.stop_token_ids=[4,5,6,7,8,9,10]"]
TP2 = ["actor.tp=2", "rollout.tp=2"]
BASELINE = [*SLOW, "algorithm.adv_estimator=remax"]
LATE_WIDE = Scenario("late, dp4", [*SLOW, *ENDS])
EARLY_WIDE = Scenario("early, dp4", [*SLOW, *ENDS, *OVERLAP])
LATE_DEEP = Scenario("late, tp2 dp2", [*SLOW, *ENDS, *TP2])
EARLY_DEEP = Scenario("early, tp2 dp2", [*SLOW, *ENDS, *TP2, *OVERLAP], _all_early)
LATE_BASELINE = Scenario("late baseline", BASELINE)
EARLY_BASELINE = Scenario("early baseline", [*BASELINE, *OVERLAP])
LATE_PARTIAL = Scenario("late partial", [*SLOW, *_PARTIAL, *TP2])
EARLY_PARTIAL = Scenario("early partial", [*SLOW, *_PARTIAL, *TP2, *OVERLAP], _all_early)
EARLY_DYNAMIC = Scenario("early dynamic sampling", [*DYNAMIC.overrides, *OVERLAP])


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (EARLY_WIDE, LATE_WIDE),
        (EARLY_DEEP, LATE_DEEP),
        (EARLY_BASELINE, LATE_BASELINE),
        (EARLY_PARTIAL, LATE_PARTIAL),
        (EARLY_DYNAMIC, DYNAMIC),
    ],
    ids=lambda scenario: scenario.name,
)
def test_scores_are_the_same_if_the_engine_draws_meanwhile(
    runs: Runs, early: Scenario, late: Scenario
) -> None:
    for rank in range(WORLD_SIZE):
        for one, other in zip(runs.steps(early, rank), runs.steps(late, rank), strict=True):
            assert one.responses == other.responses
            assert one.comparable_metrics == other.comparable_metrics
            for name in ("scores", "token_rewards", "advantages"):
                assert torch.equal(getattr(one.experience, name), getattr(other.experience, name))
            share = one.metrics["perf/scored_early"]
            assert share == 1.0 if early.fault else 0.0 <= share <= 1.0
            assert "perf/scored_early" not in other.metrics


_PLACES = ["reward.terms=[{name: CUSTOM:places, weight: 2.0}]", "reward_model=null"]
_PLACES += ["algorithm.use_kl_in_reward=false", "rollout.overlap=true"]
PLACES = Scenario("places dp4", [*_PLACES, *DP4[:2], "actor.share_prompts=true"])
PLACES_DEEP = Scenario("places tp2 pp2", [*_PLACES, *TP2_PP2, "critic.cp=2"])
PLACES_PARTIAL = Scenario("places partial", [*_PLACES, *_PARTIAL, "actor.cp=2"])
PLACES_GROUPS = Scenario("places rloo", [*_PLACES, "algorithm.adv_estimator=rloo"])


def test_values_of_a_function_stand_at_their_tokens(runs: Runs) -> None:
    assert_same_on_every_layout(runs, PLACES, PLACES_DEEP)
    for scenario in (PLACES, PLACES_DEEP, PLACES_PARTIAL, PLACES_GROUPS):
        tokenizer = load_tokenizer(runs.root / "data" / "tokenizer")
        for number, step in enumerate(runs.steps(scenario), start=1):
            experience = step.experience
            rewards = torch.zeros(experience.rollout.shape)
            for row, tokens in enumerate(step.responses):
                texts = [tokenizer.decode([token]) for token in tokens]  # one character, or none
                text = "".join(texts)
                rewards[row, len(tokens) - 1] += 2 * (0.5 + 0.5)
                rewards[row, 0] -= 2 * 0.25
                for place, letter in enumerate(text):
                    (token,) = [
                        i for i, own in enumerate(texts) if own and len("".join(texts[:i])) == place
                    ]
                    rewards[row, token] += 2 * 0.1 * (1 + place) * (letter in "02468+=")
            assert_close(experience.token_rewards, rewards)
            assert_close(experience.scores, rewards.sum(dim=1))
            placed = experience.rollout.placed
            assert placed is not None
            for row, sample in enumerate(runs.dumped(scenario, number)):
                assert sample["placed"] == [[i, placed[row, i]] for i in placed[row].nonzero()]
            mean = (rewards.sum() / len(rewards) / 2 - 0.5).item()
            assert step.metrics["reward/places/placed"] == pytest.approx(mean, abs=1e-5)

            if scenario is PLACES_GROUPS:  # the score is the sum, here against one other response
                sums = rewards.sum(dim=1).view(-1, 2)
                wanted = (sums - sums.flip(1)).view(-1, 1) * experience.rollout.loss_mask
                assert_close(experience.advantages, wanted)
            else:  # gamma = lambda = 1: all the reward to come
                mask = experience.rollout.loss_mask
                to_come = rewards.flip(1).cumsum(1).flip(1) * mask
                assert_close(experience.returns, to_come)


RAISING = Scenario("raising", ["reward.terms=[{name: CUSTOM:breaks}]", "reward_model=null"])


def test_a_users_function_that_raises_is_named(runs: Runs) -> None:
    function = f"reward function breaks of {runs.root / 'rewards.py'}"
    for rank in range(WORLD_SIZE):
        message = runs.error(RAISING, rank)
        assert f"{function} raised ZeroDivisionError: no such number" in message
        assert "\n" not in message


STOP = Scenario("stop", ["rollout.stop=['1', '2', '3', '4', '5', '+']"])
WITHOUT_STOP = Scenario("without stop", DP4)


def test_a_stop_string_ends_a_response_as_a_stop_token_does(runs: Runs) -> None:
    by_string = 0
    for number, step in enumerate(runs.steps(STOP), start=1):
        samples = runs.dumped(STOP, number)
        for sample in samples:
            has_stop = any(letter in "12345+" for letter in sample["response"])
            assert not has_stop or sample["stopped"], sample
            by_string += has_stop

        cut = sum(not sample["stopped"] for sample in samples) / len(samples)
        assert step.metrics["response_length/clip_ratio"] == pytest.approx(cut)

        rollout = step.experience.rollout
        for length, stopped in zip(rollout.response_lengths, rollout.stopped, strict=True):
            assert stopped or length == 5

    assert by_string > 4
    assert runs.steps(STOP)[0].responses != runs.steps(WITHOUT_STOP)[0].responses
