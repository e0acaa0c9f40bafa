"""The plain losses and loads of routers, with which training is compared, are those of others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.oracle.plain_models import SIZES
from tests.oracle.plain_routers import BALANCE, Choice, Routers, Z, balance_loss

EXPERTS = 8
PER_TOKEN = 3
LENGTHS = (5, 19, 12)


def _model() -> Any:
    torch.manual_seed(2)
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        moe_intermediate_size=16,
        initializer_range=0.3,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_losses_and_loads_equal_those_of_transformers() -> None:
    model = _model()
    routers = Routers(model, with_losses=True)
    generator = torch.Generator().manual_seed(3)
    loss = torch.zeros(())
    chosen: list[list[int]] = [[], []]
    for length in LENGTHS:
        tokens = torch.randint(0, SIZES["vocab_size"], (1, length), generator=generator)
        logits = model(tokens, output_router_logits=True).router_logits
        for layer, of_layer in enumerate(logits):
            # Theirs is not divided by the experts of a token.
            balance = load_balancing_loss_func((of_layer,), EXPERTS, PER_TOKEN) / PER_TOKEN
            z = of_layer.logsumexp(dim=-1).square().mean()
            loss = loss + (BALANCE * balance + Z * z) / len(LENGTHS)
            chosen[layer] += of_layer.topk(PER_TOKEN).indices.flatten().tolist()

    assert routers.losses().item() == pytest.approx(loss.item(), rel=1e-6)
    shares = [[each.count(e) / len(each) for e in range(EXPERTS)] for each in chosen]
    entropies = [-sum(p * math.log(p) for p in each if p) for each in shares]
    assert routers.metrics() == pytest.approx(
        {
            "expert_load_max": max(map(max, shares)) * EXPERTS,
            "expert_load_entropy": min(entropies) / math.log(EXPERTS),
        },
        rel=1e-6,
    )

    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert routers.losses().item() == pytest.approx(loss.item(), rel=1e-6)
    routers.begin()
    model(torch.tensor([[1, 2, 3]]))
    assert routers.metrics()["expert_load_max"] >= 1


def test_sigmoids_are_shares_of_their_sum() -> None:
    # Sigmoids 0.5 and 0.75 of the first token, 0.5 and 0.25 of the second: shares 0.4, 0.6 and
    # 2/3, 1/3, of which the means are 8/15 and 7/15. Both tokens go to the first expert.
    logits = torch.tensor([[0.0, math.log(3)], [0.0, -math.log(3)]])
    choice = Choice(logits, torch.tensor([[0], [0]]))
    assert balance_loss(choice, sigmoid=True).item() == pytest.approx(2 * 8 / 15)


def test_a_tie_is_found() -> None:
    model = _model()
    Routers(model, with_losses=False)
    model.model.layers[0].mlp.gate.weight.data.zero_()
    with pytest.raises(AssertionError, match="nearly tied"):
        model(torch.tensor([[1, 2, 3]]))
