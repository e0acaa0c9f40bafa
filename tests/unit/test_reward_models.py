"""What is told of a reward model, and the one score of an ensemble."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrlhf.batch import Sequences
from mrlhf.config.pair_losses import RewardLossSection
from mrlhf.data.preferences import ComparedPair, PreferenceRows
from mrlhf.rl.ensembles import combine_scores, spread_of
from mrlhf.roles import reward_model
from mrlhf.roles.reward_model import RewardModel
from mrlhf.trainers.reward_model import PreferenceLearning
from mrlhf.trainers.reward_quality import quality_of, score_moments, words_on_length

SCORES = torch.tensor([[1.0, 4.0], [3.0, 2.0], [2.0, 0.0]])


def test_an_ensembles_score_by_hand() -> None:
    # The variances are 2/3 and 8/3.
    assert combine_scores("mean", SCORES, 9.0).tolist() == [2.0, 2.0]
    assert combine_scores("min", SCORES, 9.0).tolist() == [1.0, 0.0]
    variances = combine_scores("mean_minus_variance", SCORES, 0.5).tolist()
    assert variances == pytest.approx([2 - 1 / 3, 2 - 4 / 3])
    deviations = combine_scores("mean_minus_std", SCORES, 0.5).tolist()
    assert deviations == pytest.approx([2 - math.sqrt(1 / 6), 2 - math.sqrt(2 / 3)])
    assert spread_of(SCORES).tolist() == pytest.approx([math.sqrt(2 / 3), math.sqrt(8 / 3)])


def test_reference_answers_have_the_mean_score_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def sums(engine: Any, sequences: Sequences) -> torch.Tensor:
        each = [float(sequences[row].sum()) for row in range(len(sequences))]
        return engine.factor * torch.tensor([each])

    monkeypatch.setattr(reward_model, "score_sequences", sums)
    monkeypatch.setattr(reward_model, "_ANSWERS_AT_ONCE", 2)
    groups = SimpleNamespace(machine=SimpleNamespace(compute_on_leader=lambda compute: compute()))
    engines = [SimpleNamespace(factor=factor, groups=groups) for factor in (1.0, -2.0)]
    rollout = SimpleNamespace(sequences=lambda: Sequences.of([[4, 6], [1, 1, 2]], [1, 2]))

    # The sums 3, 12 and 6 have the mean 7.
    answered = [([1], [2]), ([3], [4, 5]), ([1, 1], [4])]
    members: Any = list(zip(engines, torch.tensor([[0.5], [0.0]]), strict=True))
    model = RewardModel(members, "min", answered=answered)
    scores, further = model.score(rollout)
    assert model.reference_means == [7.5, -14.0]
    assert scores.tolist() == [min(10.5 - 7.5, -20 + 14), min(4.5 - 7.5, -8 + 14)]
    assert further.keys() == {"std"} and further["std"].tolist() == [4.5, 4.5]

    model.reference_means = [0.0, 0.0]  # of a checkpoint
    assert model.score(rollout)[0].tolist() == [-20.0, -8.0]


def _pairs(count: int, margins: list[float] | None = None, ties: int = 0) -> list[ComparedPair]:
    """Pairs of responses 0 and 1, 2 and 3, and so on; the last ones are ties."""
    each = margins or [0.0] * count
    return [
        ComparedPair(2 * row, 2 * row + 1, each[row], row >= count - ties, 1.0)
        for row in range(count)
    ]


def test_ties_alone_leave_no_number_that_json_lacks() -> None:
    rows = PreferenceRows([[[1, 2], [1, 3]]], [1], ties=[True])
    task = PreferenceLearning(RewardLossSection(), rows, rows)
    assert task.summary(quality_of(_pairs(1, ties=1), torch.zeros(2), [1, 1])) == {}
    assert task.summary({"val/accuracy": 0.75}) == {"rm_pair_accuracy": 0.75}


def test_quality_by_hand() -> None:
    # Gaps of 1, -2, 3 and of a tie; the chosen response is longer, shorter, longer.
    scores = torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0, -2.0, 5.0, 5.0])
    lengths = [4, 3, 2, 6, 5, 4, 9, 1]
    assert list(quality_of([], scores, lengths)) == ["val/accuracy"]  # ties tell nothing
    told = quality_of(_pairs(4, ties=1), scores, lengths)
    assert told["val/accuracy"] == pytest.approx(2 / 3)
    # Thirds by |gap|: right, wrong, right.
    buckets = [told[f"val/accuracy/{name}_margin"] for name in ("small", "medium", "large")]
    assert buckets == [1.0, 0.0, 1.0]
    # sigmoid(1), (2) and (3) are 0.731, 0.881 and 0.953, in bins of their own.
    assert told["val/calibration_error"] == pytest.approx(
        (0.26894 + 0.88080 + 0.04743) / 3, abs=1e-5
    )
    # Two of the longer are the better ones; all of the longer score higher.
    assert told["val/longer_preferred"] == pytest.approx(2 / 3)
    assert told["val/longer_scores_higher"] == 1.0
    words = words_on_length(told)
    assert words is not None and "100%" in words and "67%" in words
    assert score_moments(scores)["val/score/mean"] == pytest.approx(12 / 8)

    by_data = quality_of(_pairs(4, [5.0, 1.0, 3.0, 0.0], ties=1), scores, lengths)
    buckets = [by_data[f"val/accuracy/{name}_margin"] for name in ("small", "medium", "large")]
    assert buckets == [0.0, 1.0, 1.0]


def test_a_sure_and_right_model_is_calibrated_and_a_wrong_one_is_not() -> None:
    # Of 1,000 pairs with a gap of log 3, three quarters are right.
    gaps = [math.log(3.0) if row % 4 else -math.log(3.0) for row in range(1000)]
    scores = torch.tensor([number for gap in gaps for number in (gap, 0.0)])
    told = quality_of(_pairs(1000), scores, [1] * 2000)
    assert told["val/calibration_error"] == pytest.approx(0.0, abs=1e-6)
    assert "val/longer_preferred" not in told and words_on_length(told) is None
    wrong = quality_of(_pairs(1000), scores.view(-1, 2).flip(1).flatten(), [1] * 2000)
    assert wrong["val/calibration_error"] == pytest.approx(0.5)
