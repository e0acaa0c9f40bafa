"""Equal scores are counted among the responses that are compared."""

import pytest
import torch

from mrlhf.trainers.ppo.experience import equal_score_metrics

PROMPTS = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("estimator", "scores", "all_equal", "groups"),
    [
        ("gae", [0.5, 0.5, 0.5, 0.5], 1.0, None),
        ("gae", [1.0, 1.0, 0.0, 0.0], 0.0, None),
        ("grpo", [0.0, 0.0, 0.0, 0.0], 1.0, 1.0),
        ("grpo", [1.0, 1.0, 0.0, 0.0], 0.0, 1.0),
        ("rloo", [1.0, 1.0, 0.0, 1.0], 0.0, 0.5),
        ("grpo", [1.0, 0.0, 0.0, 1.0], 0.0, 0.0),
        ("gdpo", [[1.0, 1.0, 0.0, 0.0], [2.0] * 4], 0.0, 1.0),
        ("gdpo", [[1.0] * 4, [2.0] * 4], 1.0, 1.0),
        ("gdpo", [[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 2.0, 2.0]], 0.0, 0.5),
    ],
)
def test_equal_scores(estimator, scores, all_equal, groups):
    measured = equal_score_metrics(torch.tensor(scores), PROMPTS, estimator)
    assert measured.pop("training/equal_scores") == all_equal
    assert measured == ({} if groups is None else {"training/equal_groups": groups})


def test_each_prompt_counts_once():
    prompts = torch.tensor([0, 0, 0, 0, 1, 1])
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    assert equal_score_metrics(scores, prompts, "grpo")["training/equal_groups"] == 0.5


def test_one_response_or_one_a_prompt_has_nothing_to_be_compared_with():
    assert equal_score_metrics(torch.tensor([0.5]), torch.tensor([0]), "rloo") == {}
    two = equal_score_metrics(torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), "rloo")
    assert two == {"training/equal_scores": 0.0}
