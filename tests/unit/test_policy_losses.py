"""Every policy loss against hand-computed numbers and the oracle; its gradient, too.

Padding and extreme values never reach the loss or the gradient.
"""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.rl.names import POLICY_LOSS_TRAITS, LossAggMode, PolicyLossName
from mrlhf.rl.policy_losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossOptions, policy_loss
from tests.aggregation import aggregate
from tests.masks import masks
from tests.oracle import plain_losses

NAMES = get_args(PolicyLossName)
DEFAULTS = PolicyLossOptions()
# Bounds that a random draw meets on both sides.
OPTIONS = PolicyLossOptions(
    clip_low=0.1, clip_high=0.3, clip_c=1.8, tau_pos=1.2, tau_neg=0.9, ppo_kl_coef=0.7
)
NUMBERS = plain_losses.Numbers(
    **vars(OPTIONS), trust_low=OPTIONS.clip_low, trust_high=OPTIONS.clip_high
)


def _inputs(logprob, old, advantages, mask=None, selected=None):
    logprob, old, advantages = (
        torch.as_tensor(x, dtype=torch.float64) for x in (logprob, old, advantages)
    )
    mask = torch.ones(logprob.shape, dtype=torch.bool) if mask is None else mask
    return PolicyLossInputs(logprob, old, advantages, mask, selected)


def _random_inputs(seed, mask):
    generator = torch.Generator().manual_seed(seed)
    logprob, old = -2 * torch.rand(2, *mask.shape, dtype=torch.float64, generator=generator)
    advantages = torch.randn(mask.shape, dtype=torch.float64, generator=generator)
    return _inputs(
        logprob, old, advantages, mask, torch.rand(mask.shape, generator=generator) < 0.4
    )


def _loss(name, inputs, options=OPTIONS):
    return policy_loss(POLICY_LOSSES[name], inputs, options)


# ---- hand-computed numbers: a row of one token, old -2.0, new -1.5, so d = .5 and r = e^.5 =
# 1.6487213


@pytest.mark.parametrize(
    ("name", "advantage", "options", "loss", "clipped", "clipped_lower"),
    [
        ("vanilla", 0.5, DEFAULTS, -0.6, True, False),
        ("vanilla", -0.5, DEFAULTS, 0.8243606, False, False),
        ("vanilla", -0.5, PolicyLossOptions(clip_c=1.5), 0.75, False, True),
        ("vanilla", 0.5, PolicyLossOptions(clip_high=0.28), -0.64, True, False),
        ("gspo", 0.5, DEFAULTS, -0.6, True, False),
        ("gspo", -0.5, PolicyLossOptions(clip_c=1.5), 0.8243606, False, False),
        ("cispo", 0.5, DEFAULTS, 0.9, True, False),
        ("cispo", -0.5, DEFAULTS, -0.9, True, False),
        ("cispo", 0.5, PolicyLossOptions(clip_high=1.0), 1.2365410, False, False),
        ("sapo", 0.5, DEFAULTS, -1.3134445, False, False),
        ("sapo", -0.5, DEFAULTS, 1.2647561, False, False),
        ("gpg", 0.5, DEFAULTS, 0.75, False, False),
        ("reinforce", -0.5, DEFAULTS, -0.75, False, False),
        ("surrogate", 0.5, DEFAULTS, -0.8243606, False, False),
        ("geo_mean", 0.5, DEFAULTS, -0.6107014, True, False),
        ("geo_mean", -0.5, DEFAULTS, 0.8243606, False, True),
        # The probability rises from .1353 to .2231, by .0878; the binary KL is .0249 nats.
        ("dppo_tv", 0.5, PolicyLossOptions(clip_high=0.0879), 1.2365410, False, False),
        ("dppo_tv", 0.5, PolicyLossOptions(clip_high=0.0877), 0.0, True, False),
        ("dppo_tv", -0.5, PolicyLossOptions(clip_low=0.01), -1.2365410, False, False),
        ("dppo_tv", -0.5, PolicyLossOptions(clip_c=1.5), -1.125, False, True),
        ("dppo_tv", 0.5, PolicyLossOptions(clip_high=0.0, clip_c=1.5), 0.0, True, False),
        ("dppo_kl", 0.5, PolicyLossOptions(clip_high=0.0250), 1.2365410, False, False),
        ("dppo_kl", 0.5, PolicyLossOptions(clip_high=0.0248), 0.0, True, False),
        ("dppo_kl", -0.5, PolicyLossOptions(clip_low=0.0), -1.2365410, False, False),
        ("dppo_kl", 0.5, PolicyLossOptions(clip_c=1.5), 1.125, False, True),
    ],
)
def test_numbers_of_one_token(name, advantage, options, loss, clipped, clipped_lower):
    result = _loss(name, _inputs([[-1.5]], [[-2.0]], [[advantage]]), options)
    assert result.per_token.item() == pytest.approx(loss, abs=2e-7)
    assert (result.clipped.item(), result.clipped_lower.item()) == (clipped, clipped_lower)
    assert result.approx_kl.item() == -0.5


def test_dual_clip_of_the_worked_example():
    result = _loss("vanilla", _inputs([[0.0]], [[-2.0]], [[-0.5]]), DEFAULTS)
    assert result.per_token.item() == 1.5
    assert result.clipped_lower.item() and not result.clipped.item()


def test_the_ratio_of_a_sequence_is_capped():
    logprob = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    inputs = PolicyLossInputs(
        logprob, logprob.detach() - 12, logprob.detach() - 1, torch.tensor([[True]])
    )
    result = _loss("gspo", inputs, DEFAULTS)
    result.per_token.sum().backward()
    assert result.per_token.item() == pytest.approx(math.exp(10)) and logprob.grad.item() == 0.0


@pytest.mark.parametrize(
    ("logprob", "old", "advantage", "loss"),
    [
        (-0.1, 1e-7, -1.0, -0.0904837),  # a certain token, rounded beyond certainty: KL .1, inside
        (
            -0.7,
            -math.inf,
            1.0,
            2.1,
        ),  # an impossible one: KL log(1 / (1 - e^-.7)) = .686, inside; r cut to 3
    ],
)
def test_the_binary_kl_of_certain_and_impossible_tokens(logprob, old, advantage, loss):
    options = PolicyLossOptions(clip_low=0.2, clip_high=0.7)
    result = _loss("dppo_kl", _inputs([[logprob]], [[old]], [[advantage]]), options)
    assert result.per_token.item() == pytest.approx(loss, abs=1e-6)


def test_a_sequence_weighs_each_of_its_tokens_alike():
    # d = .5 and -.1; the third token does not count.
    mask = torch.tensor([[True, True, False]])
    logprob = [[-1.5, -1.1, -9.0]]
    old = [[-2.0, -1.0, -1.0]]
    up = _inputs(logprob, old, [[0.5, 0.5, 9.0]], mask)
    down = _inputs(logprob, old, [[-0.5, -0.5, 9.0]], mask)

    expected = {
        ("gspo", up): ([-0.6, -0.6, 0.0], [True, True, False], [False] * 3),  # e^.2 = 1.2214028
        ("gspo", down): ([0.6107014, 0.6107014, 0.0], [False] * 3, [False] * 3),
        ("geo_mean", up): (
            [-0.5256355, -0.5256355, 0.0],
            [True, False, False],
            [False] * 3,
        ),  # e^((.2 - .1) / 2)
        ("geo_mean", down): ([0.6107014, 0.6107014, 0.0], [False] * 3, [True, False, False]),
    }
    for (name, inputs), (loss, clipped, clipped_lower) in expected.items():
        result = _loss(name, inputs, DEFAULTS)
        torch.testing.assert_close(
            result.per_token, torch.tensor([loss], dtype=torch.float64), atol=1e-7, rtol=0
        )
        assert result.clipped.tolist() == [clipped] and result.clipped_lower.tolist() == [
            clipped_lower
        ]


def test_geo_mean_averages_the_advantages_of_a_row():
    result = _loss("geo_mean", _inputs([[-1.0, -1.0]], [[-1.0, -1.0]], [[1.0, -0.4]]), DEFAULTS)
    torch.testing.assert_close(result.per_token, torch.tensor([[-0.3, -0.3]], dtype=torch.float64))


def test_selected_tokens_lose_their_loss_or_gain_a_penalty():
    inputs = _inputs(
        [[-1.5, -1.5]], [[-2.0, -2.0]], [[0.5, 0.5]], selected=torch.tensor([[True, False]])
    )
    clip_cov, kl_cov = (_loss(name, inputs, DEFAULTS) for name in ("clip_cov", "kl_cov"))
    torch.testing.assert_close(clip_cov.per_token, torch.tensor([[0.0, -0.6]], dtype=torch.float64))
    assert clip_cov.clipped.tolist() == [[True, False]]
    expected = torch.tensor([[-0.8243606 + 0.05, -0.8243606]], dtype=torch.float64)
    torch.testing.assert_close(kl_cov.per_token, expected, atol=1e-7, rtol=0)
    assert not kl_cov.clipped.any()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_covariance_loss_asks_for_its_selection(name):
    with pytest.raises(ValueError, match=f"policy loss '{name}' needs `selected`"):
        _loss(name, _inputs([[0.0]], [[0.0]], [[1.0]]), DEFAULTS)


def test_which_losses_are_of_sequences_and_which_select_tokens():
    traits = POLICY_LOSS_TRAITS.items()
    assert {name for name, it in traits if it.sequence_level} == {"gspo", "sapo", "geo_mean"}
    assert {name for name, it in traits if it.selects_tokens} == {"clip_cov", "kl_cov"}


def test_a_dual_clip_inside_the_trusted_region_is_refused():
    with pytest.raises(AssertionError, match="clip_c"):
        _loss("vanilla", _inputs([[0.0]], [[0.0]], [[0.0]]), PolicyLossOptions(clip_c=1.0))


def _plain(name, inputs):
    """Loss, clipped and clipped_lower of each token as the oracle has them; outside the mask 0."""
    rows = []
    for row in zip(*vars(inputs).values(), strict=True):
        logprob, old, advantages, mask, selected = row
        weights = torch.ones_like(old)
        rows.append(plain_losses.Row(logprob, old, advantages, mask, weights, selected))
    tables = [vars(row).values() for row in plain_losses.token_losses(name, rows, NUMBERS)]
    return [torch.stack(table).masked_fill(~inputs.mask, 0) for table in zip(*tables, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_oracle(name):
    inputs = _random_inputs(1, torch.rand(40, 9, generator=torch.Generator().manual_seed(2)) < 0.7)
    plain_logprob, logprob = inputs.logprob.clone(), inputs.logprob.clone()
    wanted, clipped, lower = _plain(name, replace(inputs, logprob=plain_logprob.requires_grad_()))
    wanted.sum().backward()
    result = _loss(name, replace(inputs, logprob=logprob.requires_grad_()))
    result.per_token.sum().backward()

    torch.testing.assert_close(result.per_token, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprob.grad, plain_logprob.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(result.clipped & inputs.mask, clipped)
    assert torch.equal(result.clipped_lower & inputs.mask, lower)
    # The example reaches both sides of every clip that the loss has.
    if name not in ("sapo", "gpg", "kl_cov", "surrogate", "reinforce"):
        assert 10 < clipped.sum() < inputs.mask.sum() - 10
    if name in ("vanilla", "geo_mean", "dppo_tv", "dppo_kl"):
        assert 10 < lower.sum() < inputs.mask.sum() - 10


# ---- what must hold whatever the mask


def _summed(name, inputs, mode):
    return aggregate(_loss(name, inputs, OPTIONS).per_token, inputs.mask, mode, 7.0)


def _rows(inputs, rows):
    return PolicyLossInputs(*(table[rows] for table in vars(inputs).values()))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(
    mask=masks(),
    seed=st.integers(0, 1000),
    mode=st.sampled_from(get_args(LossAggMode)),
    cut=st.integers(0, 4),
)
def test_parts_add_up_to_the_whole(name, mask, seed, mode, cut):
    inputs = _random_inputs(seed, mask)
    cut = min(cut, len(mask))
    parts = [_rows(inputs, slice(0, cut)), _rows(inputs, slice(cut, None))]
    total = sum(_summed(name, part, mode) for part in parts if len(part.mask))
    torch.testing.assert_close(total, _summed(name, inputs, mode), rtol=1e-12, atol=1e-12)
    loss = _plain(name, inputs)[0]
    torch.testing.assert_close(total, aggregate(loss, mask, mode, 7.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(
    mask=masks(),
    seed=st.integers(0, 1000),
    junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
)
def test_padding_reaches_neither_loss_nor_gradient(name, mask, seed, junk):
    inputs = _random_inputs(seed, mask)
    losses = []
    gradients = []
    for fill, width in ((0.0, 0), (junk, 2)):
        wide = PolicyLossInputs(
            *(
                torch.nn.functional.pad(x.masked_fill(~mask, fill), (0, width), value=fill)
                for x in (inputs.logprob, inputs.old_logprob, inputs.advantages)
            ),
            torch.nn.functional.pad(mask, (0, width)),
            # A selection outside the mask must not count either.
            torch.nn.functional.pad(inputs.selected | ~mask, (0, width), value=True),
        )

        logprob = wide.logprob.clone().requires_grad_()
        result = _loss(name, replace(wide, logprob=logprob), OPTIONS)
        assert not result.per_token[~wide.mask].any() and not result.clipped[~wide.mask].any()
        result.per_token.sum().backward()  # summed without the mask: nothing may hide behind it
        assert not logprob.grad[~wide.mask].any()
        losses.append(result.per_token[:, : mask.shape[1]])
        gradients.append(logprob.grad[:, : mask.shape[1]])

    # Not bit for bit: vector instructions round by where in a row of memory a number stands.
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_stay_finite(name, dtype):
    # Every pairing of certain, ordinary and all but impossible tokens with each sign of the
    # advantage, and empty rows.
    values = [0.0, 1e-7, -1e-9, -0.7, -30.0, -1e4]
    signs = [1.0, 0.0, -1.0]
    tokens = [(new, old, a) for new in values for old in [*values, -math.inf, -50.0] for a in signs]
    logprob, old, advantages = torch.tensor(tokens, dtype=dtype).T.reshape(3, -1, 4)
    mask = torch.rand(logprob.shape, generator=torch.Generator().manual_seed(3)) < 0.8
    mask[::5] = False

    for keep in (mask, ~mask, torch.ones_like(mask), torch.zeros_like(mask)):
        leaf = logprob.clone().requires_grad_()
        result = _loss(name, PolicyLossInputs(leaf, old, advantages, keep, mask), DEFAULTS)
        result.per_token.sum().backward()
        assert result.per_token.dtype == dtype
        for numbers in (result.per_token, leaf.grad, result.approx_kl):
            assert numbers.isfinite().all()
