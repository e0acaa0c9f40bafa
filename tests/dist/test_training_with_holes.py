"""Updates from responses in which some tokens do not train equal those of the plain loop.

The tokens stand for a tool's answers. What the tables hold at their positions must not matter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mrlhf.batch import Experience
from tests import plain_ppo, rollouts
from tests.dist.role_runs import (
    Form,
    assert_trained_alike,
    load_experience,
    save_inputs,
    settings,
    train,
)
from tests.plain_ppo import Case, Outcome
from tests.ranks import run_ranks

WORLD_SIZE = 2
SEVERAL_PACKS = Form("several packs", 20, distributed_optimizer=True)
# Row and tokens [begin, end) of each span that the policy did not draw: inside a response, at its
# begin, at its end, and two in one response.
HOLES = ((0, 1, 3), (2, 3, 7), (4, 0, 3), (6, 3, 5), (7, 2, 5), (7, 7, 8))
ALL_TERMS = {
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.3,
    "entropy_coeff": 0.05,
    "positive_lm_coef": 0.3,
}
CASES = {
    "all terms": Case("llama", "token-mean", ALL_TERMS),
    "sequence means": Case("llama", "seq-mean-token-mean"),
    "weights and rejection": Case("llama", "seq-mean-token-mean", corrected=True, loss="gspo"),
    "covariance": Case("llama", "token-mean", loss="clip_cov"),
    "bypass, sequence weights": Case(
        "llama", "seq-mean-token-sum", loss="reinforce", bypass="sequence"
    ),
    "bypass, rejection": Case("llama", "token-mean", bypass="geo"),
}


def with_holes(experience: Experience) -> Experience:
    """The same experience, in which the policy did not draw the tokens at `HOLES`."""
    not_drawn = torch.zeros_like(experience.loss_mask)
    for row, begin, end in HOLES:
        not_drawn[row, begin:end] = True
    assert (experience.rollout.response_mask[not_drawn]).all()

    return replace(
        experience,
        rollout=rollouts.with_holes(experience.rollout, not_drawn),
        loss_mask=experience.loss_mask & ~not_drawn,
    )


def in_ranks(rank: int, world_size: int, root: str) -> dict[str, dict[str, float]]:
    """Metrics of actor and critic by layout and case; weights go below `root`."""
    torch.set_num_threads(1)
    metrics = {}
    for setting in settings(Path(root), world_size, [SEVERAL_PACKS]):
        for name, case in CASES.items():
            label = f"{setting.name}, {name}"
            experience = with_holes(load_experience(setting.root, case))
            trained = train(setting, case, experience, Path(root) / label)
            if case.bypass is not None:
                assert torch.equal(trained.evaluated, experience.rollout.loss_mask)
            metrics[label] = trained.metrics
    return metrics


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and experiences without holes."""
    directory = tmp_path_factory.mktemp("holes")
    save_inputs(directory)
    return directory


def expected_outcomes(root: Path, case: Case) -> dict[str, Outcome]:
    experience = with_holes(load_experience(root, case))
    model = root / case.model
    outcomes = {"actor": plain_ppo.train_actor(case, model, experience)}
    if case.has_critic:
        outcomes["critic"] = plain_ppo.train_critic(case, model, experience)
    return outcomes


def test_updates_equal_the_plain_loop(root: Path) -> None:
    ranks = run_ranks(WORLD_SIZE, in_ranks, str(root))
    expected = {name: expected_outcomes(root, case) for name, case in CASES.items()}

    assert len(ranks[0]) == 3 * len(CASES)  # three layouts
    for label, metrics in ranks[0].items():
        assert all(rank[label] == metrics for rank in ranks), f"{label}: ranks differ"
        _, name = label.split(", ", 1)
        for role, outcome in expected[name].items():
            assert_trained_alike(metrics, root / label / role, outcome, outcome.metrics, label)


def test_the_holes_change_the_update(root: Path) -> None:
    for name, case in CASES.items():
        whole = plain_ppo.train_actor(case, root / case.model, load_experience(root, case))
        holed = expected_outcomes(root, case)["actor"]
        norms = [outcome.metrics["actor/grad_norm"] for outcome in (holed, whole)]
        assert abs(norms[0] - norms[1]) > 1e-3, (name, norms)
