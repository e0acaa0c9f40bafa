"""The engine's mixtures: compiled products against torch's, and routers against transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mrlhf.inference.native.experts import (
    HostExperts,
    LocalExperts,
    Matrices,
    Stack,
    TorchExperts,
    all_at_once,
    grouped,
    make_experts,
    one_by_one,
)
from mrlhf.inference.native.linear import Factors, linear
from mrlhf.inference.native.mlp import ExpertChoice
from mrlhf.models.grouped_products import stacked
from mrlhf.models.spec import ClampedSwish, Experts, Scoring
from tests.models.engines import hf_model, spec_of
from tests.models.mixtures import MIXTURES, router_of

COUNT = 7
PER_TOKEN = 3
SIZES = [(64, 48), (20, 33), (8, 1)]  # hidden, width
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]


def _weights(hidden: int, width: int, dtype: torch.dtype, seed: int = 0) -> LocalExperts[Matrices]:
    """All experts of a layer."""
    generator = torch.Generator().manual_seed(seed)
    fc1 = torch.randn(COUNT, 2 * width, hidden, generator=generator) * hidden**-0.5
    fc2 = torch.randn(COUNT, hidden, width, generator=generator) * width**-0.5
    return LocalExperts(0, Matrices(list(fc1.to(dtype))), Matrices(list(fc2.to(dtype))))


def _some(experts: LocalExperts[Matrices], held: range) -> LocalExperts[Matrices]:
    numbers = slice(held.start, held.stop)
    fc1, fc2 = (Matrices(*(part[numbers] for part in fc)) for fc in (experts.fc1, experts.fc2))
    return LocalExperts(held.start, fc1, fc2)


def _stack(
    experts: LocalExperts[Matrices], dtype: torch.dtype = torch.float32
) -> LocalExperts[Stack]:
    fc1, fc2 = (Stack(stacked(fc.weights).to(dtype)) for fc in (experts.fc1, experts.fc2))
    return LocalExperts(experts.first, fc1, fc2)


def _tokens(count: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and their shares; nearly all go to expert 2, and none to expert 5."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, hidden, generator=generator).to(dtype)
    scores = torch.rand(count, COUNT, generator=generator)
    scores[: -(-9 * count // 10), 2] += 1
    scores[:, 5] = -1
    shares, chosen = scores.topk(PER_TOKEN, dim=-1)
    return x, chosen, shares


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 5, 200])
@pytest.mark.parametrize("held", [range(COUNT), range(2, 4), range(5, 6)])
def test_compiled_experts_equal_torch(
    dtype: torch.dtype, weight_dtype: torch.dtype, hidden: int, width: int, tokens: int, held: range
) -> None:
    experts = _some(_weights(hidden, width, weight_dtype), held)
    x, chosen, shares = _tokens(tokens, hidden, dtype)
    compiled = make_experts(experts, dtype)
    assert isinstance(compiled, HostExperts), "this machine has no C++ compiler"

    wanted = one_by_one(_stack(experts, dtype), x, chosen, shares)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    given = compiled(x, chosen, shares)
    assert given.dtype == dtype
    torch.testing.assert_close(given, wanted, rtol=tolerance, atol=tolerance)
    assert bool(wanted.any()) == (held != range(5, 6))


@pytest.mark.parametrize("held", [range(COUNT), range(2, 4), range(5, 6)])
def test_the_ways_of_a_gpu_give_the_same(held: range) -> None:
    experts = _stack(_some(_weights(64, 48, torch.float32), held))
    tokens = _tokens(9, 64, torch.float32)
    wanted = one_by_one(experts, *tokens)
    torch.testing.assert_close(all_at_once(experts, *tokens), wanted, rtol=1e-5, atol=1e-5)
    if hasattr(F, "grouped_mm"):
        torch.testing.assert_close(grouped(experts, *tokens), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("held", [range(COUNT), range(2, 4)])
def test_adapters_of_experts_are_those_of_merged_weights(held: range) -> None:
    """Ranks differ between experts, and one expert has no adapter."""
    plain = _weights(64, 48, torch.float32)
    fc1 = plain.fc1._replace(factors=_factors(96, 64))
    adapted = _some(replace(plain, fc1=fc1, fc2=plain.fc2._replace(factors=_factors(64, 48))), held)
    fc1, fc2 = (
        Matrices([_merge(*pair) for pair in zip(fc.weights, fc.factors, strict=True)])
        for fc in (adapted.fc1, adapted.fc2)
    )
    merged = LocalExperts(adapted.first, fc1, fc2)
    tokens = _tokens(9, 64, torch.float32)
    wanted = one_by_one(_stack(merged), *tokens)
    assert not torch.allclose(one_by_one(_stack(_some(plain, held)), *tokens), wanted, atol=1e-2)

    here = make_experts(adapted, torch.float32)
    stack = TorchExperts(adapted, torch.float32).stack
    ways = [here, partial(one_by_one, stack), partial(all_at_once, stack)]
    if hasattr(F, "grouped_mm"):
        ways.append(partial(grouped, stack))
    for way in ways:
        torch.testing.assert_close(way(*tokens), wanted, rtol=1e-5, atol=1e-5)


def _factors(rows: int, columns: int) -> list[Factors | None]:
    generator = torch.Generator().manual_seed(rows)
    factors: list[Factors | None] = []
    for number in range(COUNT):
        first = 0.3 * torch.randn(1 + number, columns, generator=generator)
        second = 0.3 * torch.randn(rows, 1 + number, generator=generator)
        factors.append(None if number == 3 else Factors(first, second))
    return factors


def _merge(weight: Tensor, added: Factors | None) -> Tensor:
    return weight if added is None else weight + added.second @ added.first


@pytest.mark.parametrize("held", [range(COUNT), range(2, 4)])
def test_experts_with_biases_and_clamped_gates_equal_transformers(held: range) -> None:
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=48,
        num_local_experts=COUNT,
        swiglu_alpha=1.3,
        swiglu_limit=0.6,
    )
    theirs = GptOssExperts(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in theirs.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    x, chosen, shares = _tokens(9, 64, torch.float32)
    wanted = theirs(x, chosen, shares * ((chosen >= held.start) & (chosen < held.stop)))

    parts = slice(held.start, held.stop)
    local = LocalExperts(
        held.start,
        Matrices(
            list(theirs.gate_up_proj.detach().transpose(1, 2)[parts]),
            biases=list(theirs.gate_up_proj_bias.detach()[parts]),
        ),
        Matrices(
            list(theirs.down_proj.detach().transpose(1, 2)[parts]),
            biases=list(theirs.down_proj_bias.detach()[parts]),
        ),
        ClampedSwish(1.3, 0.6),
    )
    stack = TorchExperts(local, torch.float32).stack
    ways = [make_experts(local, torch.float32), partial(one_by_one, stack)]
    ways.append(partial(all_at_once, stack))
    if hasattr(F, "grouped_mm"):
        ways.append(partial(grouped, stack))
    for way in ways:
        torch.testing.assert_close(way(x, chosen, shares), wanted, rtol=1e-5, atol=1e-5)


def test_one_expert_by_hand() -> None:
    """silu(2 * 3) * (5 * 3) * 7, of which one half counts; the other expert is elsewhere."""
    weight = torch.tensor([[2.0], [5.0]])
    local = LocalExperts(4, Matrices([weight]), Matrices([torch.tensor([[7.0]])]))
    experts = make_experts(local, torch.float32)
    out = experts(torch.tensor([[3.0]]), torch.tensor([[4, 1]]), torch.tensor([[0.5, 0.25]]))
    assert out.item() == pytest.approx(0.5 * 7 * 15 * 6 / (1 + 2.718281828**-6), rel=1e-6)


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_a_token_has_the_same_result_whatever_is_beside_it(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    experts = make_experts(_weights(44, 36, weight_dtype), dtype)
    x, chosen, shares = _tokens(120, 44, dtype)
    threads = torch.get_num_threads()
    together = experts(x, chosen, shares)
    for count in (1, 2, 7, 50):
        part = slice(3, 3 + count)
        assert torch.equal(experts(x[part], chosen[part], shares[part]), together[part])
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(experts(x, chosen, shares), together)
    finally:
        torch.set_num_threads(threads)


def test_weights_in_a_row_are_stacked_where_they_are() -> None:
    whole = torch.randn(5, 3, 2)
    view = stacked(list(whole[1:4]))
    assert view.data_ptr() == whole[1].data_ptr() and torch.equal(view, whole[1:4])
    apart = stacked([whole[0], whole[2]])
    assert torch.equal(apart, whole[[0, 2]]) and apart.data_ptr() != whole.data_ptr()
    assert torch.equal(stacked([whole[1], whole[0]]), whole[[1, 0]])


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_choose_as_transformers(name: str) -> None:
    model = hf_model(name)
    experts = spec_of(model).experts
    assert experts is not None
    number = experts.layers.index(True)
    router = router_of(model.model.layers[number])
    weight = router.proj.weight if experts.own_norms else router.weight
    bias = router.bias.detach() if experts.has_biases else None
    correction = getattr(router, "e_score_correction_bias", None)
    x = 3 * torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(4))

    read = x
    scale = None
    if experts.own_norms:
        read = router.norm(x) * router.scale.detach() * weight.shape[1] ** -0.5
        scale = router.per_expert_scale.detach()
    choice = ExpertChoice(experts, linear(weight.detach(), bias), correction, scale)
    chosen, shares = choice(read)
    _, wanted_shares, wanted = router(x)
    for own, other in ((chosen, wanted), (shares, wanted_shares)):
        assert own.shape == other.shape == (64, experts.per_token)
    by_expert = torch.zeros(64, experts.count).scatter(1, chosen, shares)
    torch.testing.assert_close(
        by_expert, torch.zeros(64, experts.count).scatter(1, wanted, wanted_shares)
    )
    assert len({tuple(row) for row in chosen.sort(dim=-1).values.tolist()}) > 5


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("count", "per_token", "groups", "kept"), [(7, 3, 1, 1), (64, 8, 8, 3)])
@pytest.mark.parametrize("corrected", [False, True])
def test_what_a_token_is_given_does_not_depend_on_the_others(
    scoring: Scoring, count: int, per_token: int, groups: int, kept: int, corrected: bool
) -> None:
    experts = Experts(
        count=count,
        per_token=per_token,
        ffn_size=1,
        layers=(True,),
        normalised=corrected,
        scoring=scoring,
        scale=2.5,
        groups=groups,
        groups_per_token=kept,
        has_correction=corrected,
    )
    generator = torch.Generator().manual_seed(count)
    logits = 4 * torch.randn(300, count, generator=generator)
    correction = torch.randn(count, generator=generator) if corrected else None
    choice = ExpertChoice(experts, linear(torch.eye(count)), correction)
    together = choice(logits)
    for tokens in (1, 2, 7):
        apart = [choice(part) for part in logits.split(tokens)]
        for own, parts in zip(together, zip(*apart, strict=True), strict=True):
            assert torch.equal(own, torch.cat(parts))

    # A number that is not finite is seen, and no expert that does not exist is asked for.
    logits[7, 2] = torch.nan
    chosen, shares = choice(logits)
    assert shares[7].isnan().any() and not shares[:7].isnan().any()
    assert int(chosen.min()) >= 0 and int(chosen.max()) < count
