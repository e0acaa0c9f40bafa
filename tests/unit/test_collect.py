"""How a step's batch is collected, and how dynamic sampling fills it with further prompts."""

import logging
from dataclasses import replace
from itertools import count

import pytest
import torch

from mrlhf.batch import Prompts
from mrlhf.config.algorithm import AlgorithmSection, FilterGroupsSection
from mrlhf.errors import ConfigError
from mrlhf.inference.base import SamplingParams
from mrlhf.parallel.phases import Phases
from mrlhf.rollout.collector import Collector
from mrlhf.rollout.dynamic_sampling import (
    DynamicSampler,
    choose_prompt_groups,
    prompt_groups_that_differ,
)
from mrlhf.rollout.generator import DrawnBatch
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scores
from tests.rollouts import as_episodes, make_rollout

N = 2


def test_a_group_differs_when_not_all_its_values_are_the_same():
    values = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.5, -1.0, 0.0])
    assert prompt_groups_that_differ(values, 2) == [False, True, False, True]
    assert prompt_groups_that_differ(values, 4) == [True, True]
    assert prompt_groups_that_differ(values, 1) == [False] * 8


def test_what_has_no_value_does_not_differ():
    nan = float("nan")
    assert prompt_groups_that_differ(torch.tensor([nan, 1.0, nan, nan, 0.0, 1.0]), 2) == [
        False,
        False,
        True,
    ]
    assert prompt_groups_that_differ(torch.tensor([nan, 1.0, 1.0, nan, 0.0, 1.0]), 3) == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("differs", "chosen"),
    [
        ([True, True, True, True], [0, 1, 2]),
        ([False, True, True, False, True, True], [1, 2, 4]),
        ([False, True, False, False, True], [0, 1, 4]),  # too few: the first of the others fills up
        ([False, False, False], [0, 1, 2]),
    ],
)
def test_the_first_groups_that_differ_are_chosen_in_their_order(differs, chosen):
    assert choose_prompt_groups(differs, 3) == chosen


class _Machine:
    """Has one rank."""

    def compute_on_leader(self, compute, shared=()):
        return compute()


class _Generator:
    """Answers prompt u with the token u; if `informative` divides u, sample 1 is u + 1 instead."""

    version = 0
    machine = _Machine()
    phases = Phases()

    def __init__(self, informative: int) -> None:
        self.informative = informative
        self.calls = []

    def generate(self, prompts, sampling, stream, step, refill=0):
        self.calls.append((stream, step, refill, len(prompts), sampling.temperature, sampling.n))
        metrics = {
            "rollout/preemptions": 1,
            "rollout/peak_kv_cache_bytes": 10 - refill,
            "rollout/imbalance": refill,
        }

        repeated = prompts.repeat(sampling.n)
        answers = [
            uid + (row % sampling.n) * (uid % self.informative == 0)
            for row, uid in enumerate(repeated.uid)
        ]

        rows = len(repeated)
        rollout = make_rollout(
            repeated,
            [row % sampling.n for row in range(rows)],
            torch.tensor(answers)[:, None],
            torch.ones(rows, 1, dtype=torch.bool),
            torch.zeros(rows, 1),
            torch.ones(rows, dtype=torch.bool),
        )
        return DrawnBatch(rollout, int(rollout.loss_mask.sum()), [metrics])

    def sleep(self):
        self.calls.append("sleep")

    def take_weights(self, version):
        self.calls.append(f"weights {version}")


class _TurnGenerator(_Generator):
    """The one turn of an episode earns its token."""

    def generate(self, prompts, sampling, stream, step, refill=0):
        drawn = super().generate(prompts, sampling, stream, step, refill)
        rewards = [[float(token)] for token in drawn.rollout.response_ids[:, 0]]
        return replace(drawn, rollout=as_episodes(drawn.rollout, rewards))


class _Scorer:
    """The score of a response is its token."""

    terms: tuple[str, ...] = ()
    has_model = False

    def score(self, rollout):
        total = rollout.response_ids[:, 0].float()
        return rollout, Scores(total, {name: total.tolist() for name in self.terms})


class _EqualScorer(_Scorer):
    """All responses have the score 1."""

    def score(self, rollout):
        return rollout, Scores(torch.ones(len(rollout)), {})


def _prompts(size):
    for batch in count():
        uids = list(range(1 + batch * size, 1 + (batch + 1) * size))
        yield Prompts([[1]] * size, uids, [""] * size, [""] * size, [""] * size, [{}] * size)


def _collector(informative, train_batch_size=4, gen_batch_size=4, greedy=False, **filters):
    generator = _Generator(informative)
    scorer = _Scorer()
    shaper = RewardShaper(AlgorithmSection(), max_response_length=5)
    prompts = _prompts(gen_batch_size)
    section = FilterGroupsSection(**filters)

    sampler = DynamicSampler(generator, scorer, shaper, prompts, train_batch_size, section)
    return Collector(
        generator=generator,
        scorer=scorer,
        shaper=shaper,
        prompts=prompts,
        sampler=sampler if section.enable else None,
        greedy_baseline=greedy,
    )


def _collect(collector):
    sampling = SamplingParams(n=N, temperature=0.8, max_tokens=5, seed=1)
    return collector.score(*collector.generate(7, sampling))


def test_equal_groups_are_replaced_by_those_of_further_prompts():
    collector = _collector(informative=2, enable=True, max_num_gen_batches=5)
    collected = _collect(collector)

    assert collected.rollout.prompts.uid == [2, 2, 4, 4, 6, 6, 8, 8]
    assert collected.scores.total.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert collector.generator.calls == [
        ("train", 7, 0, 4, 0.8, N),
        ("train", 7, 1, 4, 0.8, N),
        "sleep",
    ]

    assert collected.metrics == {
        "training/num_gen_batches": 2,
        "training/generated_groups": 8,
        "training/filtered_groups": 4,
        "training/uninformative_groups": 0,
        "rollout/preemptions": 2,
        "rollout/peak_kv_cache_bytes": 10,
        "rollout/imbalance": 0.5,
    }
    assert collected.generated_tokens == 16


@pytest.mark.parametrize("metric", ["score", "seq_reward"])
def test_rewards_of_turns_tell_responses_apart_too(metric):
    collector = _collector(informative=2, enable=True, max_num_gen_batches=5, metric=metric)
    generator = _TurnGenerator(informative=2)
    scorer = _EqualScorer()
    sampler = replace(collector.sampler, generator=generator, scorer=scorer)
    collected = _collect(replace(collector, generator=generator, scorer=scorer, sampler=sampler))
    assert collected.rollout.prompts.uid == [2, 2, 4, 4, 6, 6, 8, 8]
    assert collected.scores.total.tolist() == [1.0] * 8


def test_a_greedy_baseline_has_the_rewards_of_its_turns():
    collector = _collector(informative=2, greedy=True)
    generator = _TurnGenerator(informative=2)
    collected = _collect(replace(collector, generator=generator, scorer=_EqualScorer()))
    assert collected.greedy_scores.tolist() == [2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0]


def test_a_reward_model_finds_the_engine_asleep():
    collector = _collector(informative=2, greedy=True, enable=True, max_num_gen_batches=5)
    collector.scorer.has_model = True
    _collect(collector)
    assert [call if isinstance(call, str) else call[0] for call in collector.generator.calls] == [
        "train", "sleep", "weights 0", "train", "sleep", "weights 0", "greedy baseline", "sleep"
    ]  # fmt: skip


def test_a_batch_may_be_filled_from_smaller_ones():
    collected = _collect(
        _collector(informative=1, gen_batch_size=3, enable=True, max_num_gen_batches=5)
    )
    assert collected.rollout.prompts.uid == [1, 1, 2, 2, 3, 3, 4, 4]
    assert collected.metrics["training/num_gen_batches"] == 2


def test_at_the_limit_the_batch_is_filled_with_what_there_is_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        collected = _collect(_collector(informative=6, enable=True, max_num_gen_batches=2))
    assert collected.rollout.prompts.uid == [1, 1, 2, 2, 3, 3, 6, 6]
    assert collected.metrics["training/uninformative_groups"] == 3
    assert collected.metrics["training/filtered_groups"] == 4
    assert "3 of 4 prompt groups have equal rewards after 2 batches" in caplog.text


def test_without_filtering_each_step_is_one_batch():
    collected = _collect(_collector(informative=2))
    assert collected.rollout.prompts.uid == [1, 1, 2, 2, 3, 3, 4, 4]
    assert collected.metrics.keys() == {
        "rollout/preemptions",
        "rollout/peak_kv_cache_bytes",
        "rollout/imbalance",
    }
    assert collected.greedy_scores is None


def test_the_greedy_baseline_is_one_more_response_a_prompt():
    collector = _collector(informative=2, greedy=True, enable=True)
    collected = _collect(collector)
    assert collector.generator.calls[-2:] == [("greedy baseline", 7, 0, 4, 0.0, 1), "sleep"]
    assert collected.greedy_scores.tolist() == [2, 2, 4, 4, 6, 6, 8, 8]


def test_accuracy_needs_a_term_that_tells_it():
    collector = _collector(informative=2, enable=True, metric="acc")
    with pytest.raises(
        ConfigError, match=r"filter_groups\.metric acc .* let your function return acc"
    ):
        _collect(collector)
    assert len(collector.generator.calls) == 1  # the first batch says it
    collector.scorer.terms = ("exact_match",)
    assert _collect(collector).metrics["training/uninformative_groups"] == 0
