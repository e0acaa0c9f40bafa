"""With every loss and every kind of batch, updates equal the plain loop.

Metrics, gradient norms and updated weights of actor and critic are compared with
`tests.oracle.plain_ppo`: on one rank, on a layout with data and context parallelism, and on one
with tensor and pipeline parallelism. All other layouts, with a few of the losses, are those of
`test_invariance`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest

from mrlhf.parallel.layout import AxisSizes
from mrlhf.rl.names import PolicyLossName
from tests.dist.role_runs import (
    MANY_PACKS,
    ONE_PACK,
    assert_weights,
    load_experience,
    save_inputs,
    settings,
    train,
)
from tests.oracle import plain_losses, plain_ppo
from tests.oracle.plain_optimizer import Outcome
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

NEAR = {
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.3,
    "entropy_coeff": 0.05,
}
FULL = {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.3}
TRUST = {"clip_ratio_low": plain_losses.TRUST_LOW, "clip_ratio_high": plain_losses.TRUST_HIGH}

BASIC_CASES = {
    "plain": Case("llama", "token-mean"),
    "clipped gradient": Case("qwen2-tied", "token-sum", clip_grad=1.0),
    "sampled KL and entropy": Case("qwen2-tied", "seq-mean-token-mean", NEAR),
    "full KL": Case("olmo2", "seq-mean-token-sum-norm", FULL, clip_grad=1.0),
    "entropy": Case("llama-biases", "seq-mean-token-sum", {"entropy_coeff": -0.2}, clip_grad=1.0),
    "weights and rejection": Case("qwen3", "token-mean", NEAR, corrected=True),
}
OTHER_CASES = {
    "rejection by sequence means": Case(
        "llama", "seq-mean-token-mean", corrected=True, loss="gspo"
    ),
    "weights of a geometric mean": Case(
        "llama", "seq-mean-token-mean", corrected=True, loss="geo_mean"
    ),
    "a gradient that is no number": Case("llama", "token-mean", broken=True),
    "positive examples": Case("llama", "token-mean", {"positive_lm_coef": 0.3}),
    "bypass, reinforce": Case("llama", "token-mean", loss="reinforce", bypass="reinforce"),
    "bypass, sequence weights": Case(
        "llama", "seq-mean-token-sum", loss="reinforce", bypass="sequence"
    ),
    "bypass, rejection": Case("llama", "token-mean", bypass="geo"),
    "centred, holes": Case(
        "llama", "token-mean", loss="reinforce", bypass="token", centred=True, holes=True
    ),
    "centred, rejection, truncated": Case(
        "llama", "seq-mean-token-sum", loss="reinforce", bypass="geo", centred=True, truncated=True
    ),
}
ALL_TERMS = NEAR | {"positive_lm_coef": 0.3}
HOLE_CASES = {
    "holes, all terms": Case("llama", "token-mean", ALL_TERMS, holes=True),
    "holes, sequence means and rejection": Case(
        "llama", "seq-mean-token-mean", corrected=True, loss="gspo", holes=True
    ),
    "holes, covariance": Case("llama", "token-mean", loss="clip_cov", holes=True),
    "holes, bypass, sequence weights": Case(
        "llama", "seq-mean-token-sum", loss="reinforce", bypass="sequence", holes=True
    ),
    "holes, bypass, rejection": Case("llama", "token-mean", bypass="geo", holes=True),
}
CONTEXT_CASES = {
    "contexts, all terms": Case(
        "llama", "seq-mean-token-mean", ALL_TERMS, corrected=True, contexts=True
    ),
    "contexts, full KL": Case("olmo2", "seq-mean-token-sum-norm", FULL, contexts=True),
    "contexts, covariance": Case("llama", "token-mean", loss="clip_cov", contexts=True),
    "contexts, bypass": Case(
        "llama", "seq-mean-token-sum", loss="reinforce", bypass="reinforce", contexts=True
    ),
}
LOSS_CASES = {
    loss: Case(
        "llama",
        "seq-mean-token-mean" if loss in ("gspo", "sapo", "geo_mean") else "token-mean",
        TRUST if loss.startswith("dppo") else {},
        loss=loss,
    )
    for loss in get_args(PolicyLossName)
    if loss not in ("vanilla", "reinforce")
}
CASES = BASIC_CASES | OTHER_CASES | HOLE_CASES | CONTEXT_CASES | LOSS_CASES
UNCLIPPED = ("sapo", "gpg", "reinforce", "surrogate", "kl_cov")
CLIPPED_BELOW = ("vanilla", "geo_mean")

FORMS = {
    (1, AxisSizes()): (MANY_PACKS, ONE_PACK),
    (4, AxisSizes(cp=2)): (MANY_PACKS,),
    (4, AxisSizes(tp=2, pp=2)): (MANY_PACKS,),
}
"""By world size and the sizes of the axes."""
OF_STEPS = {f"actor/{name}" for name in ("grad_norm", "optimizer_steps", "skipped_steps", "lr")}
# What the loop does not report, since it depends on the layout.
OF_THE_LAYOUT = ("perf/", "train/")

Metrics = dict[str, dict[str, float]]
"""By layout, form and case: the metrics of the update."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and, for each, an experience."""
    directory = tmp_path_factory.mktemp("training")
    save_inputs(directory, models=sorted({case.model for case in CASES.values()}))
    return directory


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, dict[str, Outcome]]:
    """Actor and, where there is one, critic of each case, as the plain loop trains them."""
    outcomes = {}
    for name, case in CASES.items():
        experience = load_experience(root, case)
        model = root / case.model
        outcomes[name] = {"actor": plain_ppo.train_actor(case, model, experience)}
        if case.has_critic:
            outcomes[name]["critic"] = plain_ppo.train_critic(case, model, experience)
    return outcomes


@pytest.fixture(scope="module", params=[1, 4])
def trained(request: pytest.FixtureRequest, root: Path) -> tuple[Path, list[Metrics]]:
    """Where the weights went, and the metrics of each rank."""
    return root / str(request.param), run_ranks(request.param, _in_ranks, str(root))


def _in_ranks(rank: int, world_size: int, root: str) -> Metrics:
    out = Path(root) / str(world_size)
    metrics = {}
    for setting in settings(Path(root), world_size, (MANY_PACKS, ONE_PACK)):
        if setting.form not in FORMS.get(setting.layout, ()):
            continue
        for case in CASES:
            label = f"{setting.name}, {case}"
            metrics[label] = train(setting, CASES[case], out / label)
    return metrics


def _case_of(label: str) -> str:
    _, case = label.split(", ", 1)
    return case


def test_the_plain_loop_meets_every_branch(expected: dict[str, dict[str, Outcome]]) -> None:
    for name, outcomes in expected.items():
        case = CASES[name]
        if case.broken:
            continue
        for role, outcome in outcomes.items():
            assert outcome.metrics[f"{role}/grad_norm"] > case.clip_grad
            for metric, value in outcome.metrics.items():
                assert math.isfinite(value), (name, metric, value)
                assert value != 0 or _may_be_zero(metric, case), (name, metric, value)


def _may_be_zero(metric: str, case: Case) -> bool:
    """Skipped steps, and shares of clipped tokens for losses that do not clip so."""
    if metric.endswith("/skipped_steps"):
        return True
    if metric == "actor/pg_clipfrac":
        return case.loss in UNCLIPPED
    if metric == "actor/pg_clipfrac_lower":
        return case.loss not in CLIPPED_BELOW or case.bypass is not None
    return False


def test_updates_equal_the_plain_loop(
    trained: tuple[Path, list[Metrics]], expected: dict[str, dict[str, Outcome]]
) -> None:
    directory, ranks = trained
    assert {_case_of(label) for label in ranks[0]} == CASES.keys()
    for label, metrics in ranks[0].items():
        assert all(rank[label] == metrics for rank in ranks), f"{label}: the ranks' metrics differ"
        _assert_all_metrics_are_compared(metrics, expected[_case_of(label)], label)
        case = CASES[_case_of(label)]
        assert ("perf/bubble/actor" in metrics) == (" pp1 " not in label), label
        assert metrics.get("perf/bubble/actor", 1.0) > 0, label
        assert ("perf/slowest_update/actor" in metrics) == (" dp1 " not in label), label
        assert metrics.get("perf/slowest_update/actor", 1.0) > 0, label

        for role, outcome in expected[_case_of(label)].items():
            _assert_metrics(metrics, outcome, case, label)
            # Four steps of up to 1e-2. Gradients are rounded by up to 1e-6, so a step by up to
            # 1e-2 * 1e-6 / EPS.
            assert_weights(directory / label / role, outcome.weights, 1e-5, label)


def _assert_all_metrics_are_compared(
    metrics: dict[str, float], outcomes: dict[str, Outcome], label: str
) -> None:
    compared = {name for outcome in outcomes.values() for name in outcome.metrics}
    assert {name for name in metrics if not name.startswith(OF_THE_LAYOUT)} == compared, label


def _assert_metrics(metrics: dict[str, float], outcome: Outcome, case: Case, label: str) -> None:
    for name, value in outcome.metrics.items():
        if case.broken and name not in OF_STEPS:
            continue  # what a skipped mini-batch adds to the others is ours to choose
        # Sums are rounded like their terms, of which some are above and some below 0.
        near = pytest.approx(value, rel=1e-5, abs=1e-5 if "sum" in case.agg else 1e-6)
        assert metrics[name] == near, f"{label}: {name}"
