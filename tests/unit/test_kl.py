"""KL estimators against the exact divergence of small distributions; controllers by numbers."""

from typing import get_args

import pytest
import torch

from mrlhf.rl.kl import KlController, kl_penalty
from mrlhf.rl.names import KlKind

PLUS_KINDS = [kind for kind in get_args(KlKind) if kind.endswith("+")]
LOGPROB = torch.tensor([[-2.0, -1.0, -3.0]])
REF = torch.tensor([[-1.5, -1.0, -3.25]])  # log-ratios -.5, 0, .25


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["k1", "kl", "k1+", "kl+"], [-0.5, 0.0, 0.25]),
        (["abs", "abs+"], [0.5, 0.0, 0.25]),
        (["k2", "mse", "k2+", "mse+"], [0.125, 0.0, 0.03125]),
        # e^.5 - .5 - 1 and e^-.25 + .25 - 1
        (["k3", "low_var_kl", "k3+", "low_var_kl+"], [0.1487213, 0.0, 0.0288008]),
        (["k1_clamped", "k1_clamped+"], [0.0, 0.0, 0.25]),
    ],
)
def test_literal_values(kinds, expected):
    for kind in kinds:
        torch.testing.assert_close(
            kl_penalty(LOGPROB, REF, kind), torch.tensor([expected]), atol=1e-7, rtol=0
        )


def test_the_value_stays_clamped_with_a_plus_where_k2_is_large():
    far = kl_penalty(torch.tensor([-500.0]), torch.tensor([0.0]), "low_var_kl+")
    assert far.tolist() == [10.0]


def test_extreme_ratios_are_clamped_and_tiny_ones_keep_their_digits():
    far = kl_penalty(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]), "k3")
    assert far.tolist() == [10.0, 10.0]
    tiny = kl_penalty(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert tiny.item() == pytest.approx(
        5e-9, rel=0.01
    )  # e^d - d - 1, evaluated as written in float32, is off by 100%


def test_full_is_refused():
    with pytest.raises(AssertionError, match="over the vocabulary"):
        kl_penalty(LOGPROB, REF, "full")


def _policies():
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(11, dtype=torch.float64, generator=generator).requires_grad_()
    ref = torch.randn(11, dtype=torch.float64, generator=generator).log_softmax(0)
    return logits, ref


def test_k1_and_k3_have_the_exact_divergence_as_expectation():
    logits, ref = _policies()
    logprob = logits.log_softmax(0).detach()
    exact = torch.nn.functional.kl_div(ref, logprob, reduction="sum", log_target=True).item()
    for kind in ("k1", "k3", "k1+", "k3+", "kl+", "low_var_kl+"):
        expected_value = (logprob.exp() * kl_penalty(logprob, ref, kind)).sum().item()
        assert expected_value == pytest.approx(exact, rel=1e-12), kind


@pytest.mark.parametrize(
    ("kind", "unbiased"),
    [
        ("k1", False),
        ("k3", False),
        ("abs", False),
        ("k2", True),
        *((kind, True) for kind in PLUS_KINDS),
    ],
)
def test_expected_gradient_is_that_of_the_divergence_for_k2_and_plus_kinds_alone(kind, unbiased):
    logits, ref = _policies()
    logprob = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        torch.nn.functional.kl_div(ref, logprob, reduction="sum", log_target=True),
        logits,
        retain_graph=True,
    )
    sampled = (logprob.detach().exp() * kl_penalty(logprob, ref, kind)).sum()
    (gradient,) = torch.autograd.grad(sampled, logits)
    assert torch.allclose(gradient, exact, atol=1e-12) == unbiased


def test_every_kind_but_full_has_an_estimator_and_a_plus():
    plain = set(get_args(KlKind)) - set(PLUS_KINDS) - {"full"}
    assert plain >= {"k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1_clamped"}
    assert set(PLUS_KINDS) == {f"{kind}+" for kind in plain}, (
        "each kind of KlKind has a twin with +: add it in mrlhf/rl/names.py, kl_penalty in "
        "mrlhf/rl/kl.py, and its literal numbers here"
    )
    for kind in plain:
        assert kl_penalty(LOGPROB, REF, kind).equal(kl_penalty(LOGPROB, REF, f"{kind}+"))


@pytest.mark.parametrize("kind", ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1_clamped"])
def test_gradients_are_those_of_finite_differences(kind):
    # Log-ratios of both signs, away from 0 and from the limits, where abs, k1_clamped and k3 have
    # kinks.
    logprob = torch.tensor([-0.5, -1.0, -3.0, -0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.25, -1.0, -0.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, kind), (logprob,))


@pytest.mark.parametrize("kind", PLUS_KINDS)
def test_with_a_plus_the_gradient_is_the_log_ratio_also_beyond_the_limits(kind):
    logprob = torch.tensor([-2.0, -1.0, -3.0, -50.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -3.25, -1.0])
    kl_penalty(logprob, ref, kind).sum().backward()
    assert logprob.grad.tolist() == [-0.5, 0.0, 0.25, -49.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [1.0, 1.0, 1.0]),
        ("abs", [-1.0, 0.0, 1.0]),
        ("k2", [-0.5, 0.0, 0.25]),
        ("k3", [-0.6487213, 0.0, 0.2211992]),  # 1 - e^.5 and 1 - e^-.25
    ],
)
def test_gradients_literal_numbers(kind, expected):
    logprob = LOGPROB.clone().requires_grad_()
    kl_penalty(logprob, REF, kind).sum().backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([expected]), atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("current_kl", "expected"),
    [
        (0.02, 0.001 * (1 + 0.2 * 256 / 10000)),
        (0.005, 0.001 * (1 - 0.2 * 256 / 10000)),
        (0.011, 0.001 * (1 + 0.1 * 256 / 10000)),
        (0.01, 0.001),
        (-3.0, 0.001 * (1 - 0.2 * 256 / 10000)),
    ],
)
def test_adaptive_controller_moves_by_the_clipped_relative_error(current_kl, expected):
    controller = KlController("adaptive", kl_coef=0.001, target_kl=0.01, horizon=10000)
    controller.update(current_kl, n_samples=256)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_adaptive_controller_resumes_where_it_was():
    first = KlController("adaptive", kl_coef=0.001, target_kl=0.01, horizon=100)
    first.update(0.02, n_samples=64)
    second = KlController("adaptive", kl_coef=0.5, target_kl=0.01, horizon=100)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.03, n_samples=64)
    assert second.value == first.value != 0.001


def test_adaptive_controller_refuses_a_kl_that_would_destroy_it():
    controller = KlController("adaptive", kl_coef=0.001, target_kl=0.01, horizon=100)
    with pytest.raises(AssertionError, match="nan"):
        controller.update(float("nan"), n_samples=1)


def test_fixed_controller_stays_and_the_configured_value_wins_over_a_checkpoint():
    controller = KlController("fixed", kl_coef=0.05, target_kl=0.1, horizon=100)
    controller.update(7.0, n_samples=1000)
    controller.load_state_dict({"value": 0.9})
    assert controller.value == 0.05
