"""The functions of `rl` on whole numbers, half precision, rubbish outside the mask, no rows.

Whatever type numbers have, results are floating-point numbers of at least 32 bits, equal to those
of the same numbers in float64; nothing is cut to whole numbers. What stands outside a mask has no
effect, and a batch without rows or columns is no error.
"""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from mrlhf.rl import (
    advantages,
    group_advantages,
    kl,
    losses,
    masking,
    mismatch,
    preference,
    shaping,
)
from mrlhf.rl.correction import Correction, Criterion, correct, geometric_mean_weights
from mrlhf.rl.names import KlKind, LossAggMode, Statistic
from mrlhf.rl.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOptions,
    policy_loss,
    select_by_covariance,
)
from mrlhf.rl.token_baselines import (
    TokenProbabilities,
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from tests.aggregation import aggregate

# Of a table [batch, response_len], its mask, a number a row [batch], and the rows' prompt groups.
Case = Callable[[Tensor, Tensor, Tensor, Tensor], object]


def _correct(level: str | None, criteria: tuple[Criterion, ...]) -> Case:
    correction = Correction(level, None, 2.0, True, criteria)  # type: ignore[arg-type]

    def case(x: Tensor, mask: Tensor, row: Tensor, prompts: Tensor) -> object:
        corrected = correct(x, mask, correction)
        return (
            corrected.weights,
            mismatch.weight_metrics(corrected, correction, x, mask),
            mismatch.rejection_metrics(corrected, correction, x, mask),
        )

    return case


def _criterion(statistic: Statistic) -> Criterion:
    k1 = statistic.endswith("k1")
    return Criterion(statistic, 0.5 if k1 else None, 2.0)


def _moments(x: Tensor, mask: Tensor) -> masking.Moments:
    return masking.local_moments(x, mask)


def _loss(name: str) -> Case:
    function = POLICY_LOSSES[name]  # type: ignore[index]

    def case(x: Tensor, mask: Tensor, row: Tensor, prompts: Tensor) -> object:
        inputs = PolicyLossInputs(x, x / 2, x, mask, mask)
        return policy_loss(function, inputs, PolicyLossOptions()).per_token

    return case


def _baseline(function: advantages.TokenBaseline) -> Case:
    def case(x: Tensor, mask: Tensor, row: Tensor, prompts: Tensor) -> object:
        return function(x, mask, prompts, TokenProbabilities(-1 - x.double().abs(), 0 * x + 0.5, x))

    return case


CASES: dict[str, Case] = {
    "masked_sum": lambda x, mask, row, prompts: masking.masked_sum(x, mask),
    "masked_mean": lambda x, mask, row, prompts: masking.masked_mean(x, mask, dim=1),
    "whiten": lambda x, mask, row, prompts: masking.whiten(x, mask, _moments(x, mask)),
    "grpo": lambda x, mask, row, prompts: group_advantages.grpo(x, mask, prompts, True),
    "dr_grpo": lambda x, mask, row, prompts: group_advantages.grpo(x, mask, prompts, False),
    "grpo_passk": lambda x, mask, row, prompts: group_advantages.grpo_passk(x, mask, prompts, True),
    "rloo": lambda x, mask, row, prompts: group_advantages.rloo(x, mask, prompts),
    "opo": lambda x, mask, row, prompts: group_advantages.opo(x, mask, prompts),
    "gpg": lambda x, mask, row, prompts: group_advantages.gpg(x, mask, prompts, 4.0),
    "rpp": lambda x, mask, row, prompts: group_advantages.reinforce_plus_plus(x, mask, 0.25),
    "rppb": lambda x, mask, row, prompts: group_advantages.reinforce_plus_plus_baseline(
        x, mask, prompts
    ),
    "flash": lambda x, mask, row, prompts: group_advantages.flash_reinforce(x, mask),
    "remax": lambda x, mask, row, prompts: group_advantages.remax(x, mask, row),
    "gdpo": lambda x, mask, row, prompts: group_advantages.gdpo(
        torch.stack([row, row]), (0.5, 0.25), x, mask, prompts, True
    ),
    "online_dpo": lambda x, mask, row, prompts: preference.online_dpo(
        x, mask, prompts, (-x, x / 2), preference.dpo_loss
    ),
    "optimal_token_baseline": _baseline(optimal_token_baseline),
    "tir_optimal_token_baseline": _baseline(tir_optimal_token_baseline),
    "gae": lambda x, mask, row, prompts: advantages.gae(x, x, mask, 0.5, 0.75),
    "token_rewards": lambda x, mask, row, prompts: shaping.token_rewards(
        row, mask, x, 0.1, "token"
    ),
    "token_rewards, terminal": lambda x, mask, row, prompts: shaping.token_rewards(
        row, mask, x, 0.1, "terminal"
    ),
    "token_rewards, no KL": lambda x, mask, row, prompts: shaping.token_rewards(
        row, mask, None, 0.1, "token"
    ),
    "overlong_penalty": lambda x, mask, row, prompts: shaping.overlong_penalty(row, 4, 3, 1.0),
    "normalise_scores": lambda x, mask, row, prompts: shaping.normalise_scores(
        row, _moments(row, torch.ones_like(row, dtype=torch.bool))
    ),
    "normalise_by_prompt": lambda x, mask, row, prompts: shaping.normalise_by_prompt(row, prompts),
    "value_loss": lambda x, mask, row, prompts: losses.value_loss(
        x, x.flip(0), x, 0.5
    ).per_token.masked_fill(~(mask & mask.flip(0)), 0),
    "mismatch": lambda x, mask, row, prompts: mismatch.mismatch_metrics(x, x / 2, mask),
    "probabilities": lambda x, mask, row, prompts: mismatch.probability_metrics(x, x / 2, mask),
    "geometric_mean_weights": lambda x, mask, row, prompts: geometric_mean_weights(x.abs(), mask),
    "select_by_covariance": lambda x, mask, row, prompts: select_by_covariance(
        x.masked_fill(~mask, 0), x.masked_fill(~mask, 0), mask, 0.3, None, None
    ),
}
# Those of scores, which may be truth values; a batch without a token has none.
ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "gpg",
    "rpp",
    "rppb",
    "flash",
    "remax",
)
for kind in get_args(KlKind):
    if kind != "full":
        CASES[f"KL {kind}"] = lambda x, mask, row, prompts, kind=kind: kl.kl_penalty(
            x, x / 2, kind
        ).masked_fill(~mask, 0)
for mode in get_args(LossAggMode):
    CASES[mode] = lambda x, mask, row, prompts, mode=mode: aggregate(x, mask, mode, 3.0)
for loss in POLICY_LOSSES:
    CASES[f"loss {loss}"] = _loss(loss)
for level in (None, "token", "sequence"):
    CASES[f"weights {level}"] = _correct(level, ())
for statistic in get_args(Statistic):
    CASES[f"rejection {statistic}"] = _correct(None, (_criterion(statistic),))

X = torch.tensor([[0, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 1]])
MASK = torch.tensor([[True, True, False], [True, False, True], [True] * 3, [False] * 3])
ROW = torch.tensor([1, 0, 3, 1])
PROMPTS = torch.tensor([5, 5, 2, 2])


def _parts(result: object) -> list[Tensor | float]:
    """The tensors and numbers of a result."""
    if isinstance(result, dict):
        return list(result.values())
    if isinstance(result, tuple):
        return [part for item in result for part in _parts(item)]
    return [] if result is None else [result]  # type: ignore[list-item]


TYPES = [
    (name, dtype)
    for name in CASES
    for dtype in (torch.int64, torch.int32, torch.bfloat16, torch.float32, torch.bool)
    if dtype != torch.bool or name in ADVANTAGES
]


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_no_type_of_number_is_cut(name: str, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    row = ROW.to(dtype)
    found = _parts(CASES[name](x, MASK, row, PROMPTS))
    wanted = _parts(CASES[name](x.double(), MASK, row.double(), PROMPTS))
    for ours, theirs in zip(found, wanted, strict=True):
        if not isinstance(ours, Tensor):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6, nan_ok=True)
            continue
        assert ours.dtype in (torch.bool, torch.float32, torch.float64)
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_rubbish_outside_the_mask_has_no_effect(name: str) -> None:
    clean = X.double()
    found = _parts(CASES[name](clean.masked_fill(~MASK, torch.nan), MASK, ROW.double(), PROMPTS))
    wanted = _parts(CASES[name](clean.masked_fill(~MASK, 7.0), MASK, ROW.double(), PROMPTS))
    for ours, theirs in zip(found, wanted, strict=True):
        if isinstance(ours, Tensor):
            assert ours.isfinite().all() and ours.equal(theirs)
        else:
            assert ours == pytest.approx(theirs, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0), (4, 3)])
def test_nothing_to_compute_is_no_error(name: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    x = X[:rows, :columns].float()
    mask = torch.zeros(shape, dtype=torch.bool)
    for part in _parts(CASES[name](x, mask, ROW[:rows].float(), PROMPTS[:rows])):
        if isinstance(part, Tensor):
            assert part.isfinite().all()
            assert name not in ADVANTAGES or (not part.any() and part.dtype == torch.float32)
