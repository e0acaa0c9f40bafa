"""KL estimators against the exact divergence of small categorical distributions; controllers by literal numbers."""

from typing import get_args

import pytest
import torch

from mrlhf.rl.kl import KlKind, kl_penalty, make_kl_controller

LOGPROB = torch.tensor([[-2.0, -1.0, -3.0]])
REF = torch.tensor([[-1.5, -1.0, -3.25]])  # log-ratios -.5, 0, .25


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["k1", "kl", "k1+"], [-0.5, 0.0, 0.25]),
        (["abs"], [0.5, 0.0, 0.25]),
        (["k2", "mse"], [0.125, 0.0, 0.03125]),
        (["k3", "low_var_kl", "k3+"], [0.1487213, 0.0, 0.0288008]),  # e^.5 - .5 - 1 and e^-.25 + .25 - 1
        (["k1_clamped"], [0.0, 0.0, 0.25]),
    ],
)
def test_literal_values(kinds, expected):
    for kind in kinds:
        torch.testing.assert_close(kl_penalty(LOGPROB, REF, kind), torch.tensor([expected]), atol=1e-7, rtol=0)


def test_published_example():
    old = torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]])
    ref = torch.tensor([[-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]])
    torch.testing.assert_close(kl_penalty(old, ref, "k1"), torch.tensor([[0.03, 0.02, 0.03, 0.02, 0.03, 0.01]]))


def test_extreme_ratios_are_clamped_and_tiny_ones_keep_their_digits():
    far = kl_penalty(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]), "k3")
    assert far.tolist() == [10.0, 10.0]
    tiny = kl_penalty(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert tiny.item() == pytest.approx(5e-9, rel=0.01)  # e^d - d - 1, evaluated as written in float32, is off by 100%


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
    for kind in ("k1", "k3", "k1+", "k3+"):
        expected_value = (logprob.exp() * kl_penalty(logprob, ref, kind)).sum().item()
        assert expected_value == pytest.approx(exact, rel=1e-12), kind


@pytest.mark.parametrize(
    ("kind", "unbiased"), [("k1", False), ("k3", False), ("k2", True), ("k1+", True), ("k3+", True)]
)
def test_expected_gradient_is_that_of_the_divergence_for_k2_and_plus_kinds_alone(kind, unbiased):
    logits, ref = _policies()
    logprob = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        torch.nn.functional.kl_div(ref, logprob, reduction="sum", log_target=True), logits, retain_graph=True
    )
    sampled = (logprob.detach().exp() * kl_penalty(logprob, ref, kind)).sum()
    (gradient,) = torch.autograd.grad(sampled, logits)
    assert torch.allclose(gradient, exact, atol=1e-12) == unbiased


def test_every_kind_but_full_has_an_estimator():
    kinds = set(get_args(KlKind)) - {"full"}
    assert len(kinds) == 10
    for kind in kinds:
        assert kl_penalty(LOGPROB, REF, kind).shape == LOGPROB.shape


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
    controller = make_kl_controller("adaptive", kl_coef=0.001, target_kl=0.01, horizon=10000)
    controller.update(current_kl, n_samples=256)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_adaptive_controller_resumes_where_it_was():
    first = make_kl_controller("adaptive", kl_coef=0.001, target_kl=0.01, horizon=100)
    first.update(0.02, n_samples=64)
    second = make_kl_controller("adaptive", kl_coef=0.5, target_kl=0.01, horizon=100)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.03, n_samples=64)
    assert second.value == first.value != 0.001


def test_adaptive_controller_refuses_a_kl_that_would_destroy_it():
    controller = make_kl_controller("adaptive", kl_coef=0.001, target_kl=0.01, horizon=100)
    with pytest.raises(AssertionError, match="nan"):
        controller.update(float("nan"), n_samples=1)


def test_fixed_controller_stays_and_the_configured_value_wins_over_a_checkpoint():
    controller = make_kl_controller("fixed", kl_coef=0.05, target_kl=0.1, horizon=100)
    controller.update(7.0, n_samples=1000)
    controller.load_state_dict({"value": 0.9})
    assert controller.value == 0.05
