"""Normalised, clipped and penalised scores, by hand."""

import pytest
import torch

from mrlhf.batch import Prompts
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.rollout.reward_shaping import RewardShaper
from tests.rollouts import make_rollout


def _rollout(lengths, stopped, n=2):
    mask = torch.arange(10) < torch.tensor(lengths)[:, None]
    rows = len(lengths)
    prompts = Prompts([[1]] * rows, [0] * rows, [""] * rows, [""] * rows, [""] * rows, [{}] * rows)
    return make_rollout(
        prompts,
        [row % n for row in range(rows)],
        mask.long(),
        mask,
        mask.float(),
        torch.tensor(stopped),
    )


H = 0.5**0.5
OVERLONG = {"overlong_buffer": {"enable": True, "len": 4, "penalty_factor": 2.0}}
BATCH = {"reward_norm": "batch", "reward_clip": 1.0, "missing_eos_penalty": 3.0}


@pytest.mark.parametrize(
    ("keys", "scores", "lengths", "ended", "shaped"),
    [
        ({}, [1.0, -7.0, 0.5, 3.0], [1] * 4, [1] * 4, [1.0, -7.0, 0.5, 3.0]),
        ({"reward_clip": 2.0}, [1.0, -7.0, 0.5, 3.0], [1] * 4, [1] * 4, [1.0, -2.0, 0.5, 2.0]),
        # Free up to 6 tokens; 8 is half-way, 10 the limit.
        (OVERLONG, [1.0, 1.0, 1.0, 0.0], [5, 6, 8, 10], [1] * 4, [1.0, 1.0, 0.0, -2.0]),
        ({"missing_eos_penalty": 0.5}, [1.0] * 4, [1] * 4, [1, 0, 1, 0], [1.0, 0.5, 1.0, 0.5]),
        # Mean 1, std 2: -.5, -.5, -.5, 1.5, which is clipped; penalties come last.
        (BATCH, [0.0, 0.0, 0.0, 4.0], [1] * 4, [1, 1, 1, 0], [-0.5, -0.5, -0.5, 1.0 - 3.0]),
        ({"reward_norm": "group"}, [1.0, 3.0, 5.0, 5.0], [1] * 4, [1] * 4, [-H, H, 0.0, 0.0]),
    ],
)
def test_shaped_scores_by_hand(keys, scores, lengths, ended, shaped):
    shaper = RewardShaper(AlgorithmSection.model_validate(keys), max_response_length=10)
    rollout = _rollout(lengths, [bool(end) for end in ended])
    found = shaper.shape(torch.tensor(scores), rollout).tolist()
    assert found == pytest.approx(shaped, abs=1e-5 if "reward_norm" in keys else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shaped_scores_keep_their_type(dtype):
    keys = {
        "overlong_buffer": {"enable": True, "len": 4},
        "missing_eos_penalty": 0.5,
        "reward_norm": "running",
    }
    shaper = RewardShaper(AlgorithmSection.model_validate(keys), max_response_length=10)
    rollout = _rollout([1] * 4, [True] * 4)
    assert shaper.shape(torch.ones(4, dtype=dtype), rollout).dtype == dtype
    assert shaper.shape_each(torch.ones(4, dtype=dtype), rollout).dtype == dtype


def test_by_itself_a_score_is_clipped_unless_normalisation_comes_first():
    scores = torch.tensor([5.0, 8.0])
    rollout = _rollout([1, 1], [True, False])
    for norm, wanted in ((None, [1.0, 0.5]), ("group", [5.0, 7.5])):
        algorithm = AlgorithmSection(reward_clip=1.0, missing_eos_penalty=0.5, reward_norm=norm)
        assert RewardShaper(algorithm, 10).shape_each(scores, rollout).tolist() == wanted


def test_running_normalisation_knows_all_scores_so_far_and_goes_on_from_a_state():
    algorithm = AlgorithmSection(reward_norm="running")
    rollout = _rollout([1, 1], [True, True])
    shaper = RewardShaper(algorithm, max_response_length=10)
    assert shaper.shape(torch.tensor([0.0, 2.0]), rollout).tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5], abs=1e-5
    )

    resumed = RewardShaper(algorithm, max_response_length=10)
    resumed.load_state_dict(shaper.state_dict())
    for later in (shaper, resumed):
        # 0, 2, 6, 8: mean 4, variance (16 + 4 + 4 + 16) / 3
        wanted = [2 / (40 / 3) ** 0.5, 4 / (40 / 3) ** 0.5]
        assert later.shape(torch.tensor([6.0, 8.0]), rollout).tolist() == pytest.approx(
            wanted, abs=1e-5
        )
