"""Muon is the formula of its authors, matrix by matrix, in matrices that are fused too.

What it is over several ranks `tests/dist/test_invariance.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.models.parameters import is_hidden_matrix
from mrlhf.training.muon import MOMENTUM, Holders, Muon, orthogonalised
from mrlhf.training.optimizer_states import make_moments
from mrlhf.weights.shard import Piece, Rule, pieces_of
from tests.oracle.plain_muon import orthogonalise

LR = 0.02
WEIGHT_DECAY = 0.1
# Of 4 heads and 2 KV heads of size 3; ours has 2 heads of q, one of k and one of v together.
SHAPES = {"q": (12, 8), "k": (6, 8), "v": (6, 8), "down": (8, 20)}
QKV = Rule(("q", "k", "v"), dim=0, periods=2)
DOWN = Rule(("down",), dim=1)


@pytest.fixture(scope="module")
def alone() -> Iterator[Holders]:
    """This process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield Holders(group, group)
    dist.destroy_process_group()


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _fused(matrices: dict[str, Tensor]) -> Tensor:
    """Of each KV head its q rows, k rows and v rows, one after the other."""
    q, k, v = (matrices[name].view(2, -1, 8) for name in "qkv")
    return torch.cat([q, k, v], dim=1).view(24, 8)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4)])
def test_singular_values_follow_the_polynomial(shape: tuple[int, int]) -> None:
    matrix = _draw(1, *shape)
    wanted = orthogonalise(matrix).float()
    torch.testing.assert_close(orthogonalised(matrix), wanted, rtol=0, atol=2e-5)
    # torch computes in bfloat16, and so do we on a GPU.
    assert orthogonalised(matrix.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(orthogonalised(matrix.bfloat16()).float(), wanted, rtol=0, atol=0.06)


def test_the_published_coefficients() -> None:
    # 3.4445 - 4.7750 + 2.0315 = 0.7010 after the first step, and four more steps from there
    value = 0.7010
    for _ in range(4):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    assert orthogonalised(torch.tensor([[-7.0]])).item() == pytest.approx(-value, abs=1e-5)
    assert torch.equal(orthogonalised(torch.zeros(2, 3)), torch.zeros(2, 3))


def _ours(holders: Holders, matrices: dict[str, Tensor], vector: Tensor) -> tuple[Muon, Any]:
    """Muon of q, k and v in one weight, a matrix that is cut by columns, and a vector."""
    qkv = torch.nn.Parameter(_fused(matrices))
    down = torch.nn.Parameter(matrices["down"].clone())
    bias = torch.nn.Parameter(vector.clone())
    pieces: list[tuple[Piece, Tensor]] = [
        *((piece, qkv) for piece in pieces_of("qkv", QKV, SHAPES, 0, 1)),
        *((piece, down) for piece in pieces_of("down", DOWN, SHAPES, 0, 1)),
    ]
    groups: list[dict[str, Any]] = [
        {"params": [qkv, down], "lr": LR, "weight_decay": WEIGHT_DECAY},
        {"params": [bias], "lr": LR, "weight_decay": 0.0},
    ]
    return Muon(groups, pieces, holders, momentum=0.95), (qkv, down, bias)


def test_it_is_the_muon_of_torch_with_adamw_for_the_rest(alone: Holders) -> None:
    matrices = {name: 0.1 * _draw(number, *SHAPES[name]) for number, name in enumerate(SHAPES)}
    vector = _draw(9, 8)
    ours, (qkv, down, bias) = _ours(alone, matrices, vector)
    assert [ours.is_matrix(main) for main in (qkv, down, bias)] == [True, True, False]
    make_moments(ours, [qkv, down, bias], steps_taken=0)
    assert [sorted(ours.state[main]) for main in (qkv, bias)] == [
        [MOMENTUM],
        ["exp_avg", "exp_avg_sq", "step"],
    ]

    theirs = {name: torch.nn.Parameter(matrix.clone()) for name, matrix in matrices.items()}
    muon = torch.optim.Muon(
        theirs.values(), lr=LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    rest = torch.nn.Parameter(vector.clone())
    adamw = torch.optim.AdamW([rest], lr=LR, weight_decay=0.0)

    for step in range(3):
        for number, (name, weight) in enumerate(theirs.items()):
            weight.grad = _draw(100 * step + number + 10, *SHAPES[name])
        rest.grad = bias.grad = _draw(step, 8)
        grads = {name: weight.grad for name, weight in theirs.items() if weight.grad is not None}
        qkv.grad = _fused(grads)
        down.grad = grads["down"].clone()
        ours.step()
        muon.step()
        adamw.step()

    # A step is about 0.02 x 0.2 x sqrt(20) long in a singular direction, and torch's has 8 bits.
    moved = (theirs["down"] - matrices["down"]).abs().max().item()
    assert moved > 0.01
    wanted = _fused({name: weight.detach() for name, weight in theirs.items()})
    torch.testing.assert_close(qkv.detach(), wanted, rtol=0, atol=5e-4)
    torch.testing.assert_close(down.detach(), theirs["down"].detach(), rtol=0, atol=5e-4)
    torch.testing.assert_close(bias.detach(), rest.detach(), rtol=0, atol=1e-7)
    momenta = [muon.state[theirs[name]]["momentum_buffer"] for name in "qkv"]
    fused = _fused(dict(zip("qkv", momenta, strict=True)))
    torch.testing.assert_close(ours.state[qkv][MOMENTUM], fused, rtol=0, atol=1e-6)


def test_matrices_that_were_one_would_move_otherwise(alone: Holders) -> None:
    """The tolerance above sees whether q, k and v are orthogonalised together."""
    matrices = {name: torch.zeros(SHAPES[name]) for name in SHAPES}
    ours, (qkv, down, bias) = _ours(alone, matrices, torch.zeros(8))
    grads = {name: _draw(number, *SHAPES[name]) for number, name in enumerate(SHAPES)}
    qkv.grad = _fused(grads)
    down.grad = grads["down"]
    bias.grad = torch.zeros(8)
    ours.step()
    together = -LR * 0.2 * 24**0.5 * orthogonalise(_fused(grads)).float()
    assert (qkv.detach() - together).abs().max() > 3e-3


def test_only_linear_layers_of_hidden_layers_are_matrices() -> None:
    layer = "decoder.layers.0."
    hidden = (
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.experts.3.linear_fc2.weight",
        "mlp.shared.linear_fc1.weight",
    )
    others = (
        "self_attention.linear_qkv.bias",
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.router.weight",
        "mlp.shared_gate.weight",
        "mlp.linear_fc2.output_norm.weight",
    )

    assert all(is_hidden_matrix(layer + name) for name in hidden)
    assert not any(is_hidden_matrix(layer + name) for name in others)
    assert not is_hidden_matrix("output_layer.weight")
    assert not is_hidden_matrix("embedding.word_embeddings.weight")
