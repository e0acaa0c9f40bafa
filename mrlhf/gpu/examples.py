"""A small call of each operator, on which its kernel is compared with its torch form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Numbers = Callable[..., Tensor]
"""Random numbers of the given shape, on the device and of the dtype that is tried."""

_PAGE = 16
_GROUP = 2  # query heads for each of two KV heads
_DIM = 32
_LENGTHS = (40, 3)  # of two sequences
_WIDTH = 3  # blocks of the longer one


def _angles(numbers: Numbers, rows: int) -> tuple[Tensor, Tensor]:
    angles = numbers(rows, _DIM // 2 - 4).float()  # the last 8 dimensions are not rotated
    return angles.cos(), angles.sin()


def _rotate_store(numbers: Numbers) -> tuple[Any, ...]:
    tables = _angles(numbers, max(_LENGTHS))
    device = tables[0].device
    positions = torch.tensor([length - 1 for length in _LENGTHS], device=device)
    places = torch.tensor([5, 70], device=device)
    cache = [numbers(2 * _WIDTH, _PAGE, 2, _DIM) for _ in range(2)]
    norms = numbers(_DIM), numbers(_DIM)
    return numbers(2, 2, _GROUP + 2, _DIM), *norms, 1e-6, *tables, positions, places, *cache


def _paged_attention(numbers: Numbers) -> tuple[Any, ...]:
    keys, values = (numbers(2 * _WIDTH, _PAGE, 2, _DIM) for _ in range(2))
    tables = torch.arange(2 * _WIDTH, dtype=torch.int32, device=keys.device).view(2, _WIDTH)
    edges = torch.tensor([0, 4, 5], dtype=torch.int32, device=keys.device)
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=keys.device)
    q = numbers(5, 2 * _GROUP, _DIM)
    return q, keys, values, tables, edges, lengths, 4, max(_LENGTHS), 7, 0.3


def _draw(numbers: Numbers) -> tuple[Any, ...]:
    logits = numbers(4, 3000)
    uniform = torch.tensor([0.0, 0.3, 0.999, -1.0], dtype=torch.float64, device=logits.device)
    return logits, 1.5, uniform


_VALID = 1500  # of the columns of logits


def _logits(numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of 3 tokens, their targets, of which one is on another rank, and other logits."""
    logits, others = numbers(3, 1600), numbers(3, 1600)
    return logits, torch.tensor([107, 1400, 30], device=logits.device), others


def _vocab_sums(numbers: Numbers) -> tuple[Any, ...]:
    logits, *rest = _logits(numbers)
    return logits.new_ones(8, 3, dtype=torch.float32), logits, *rest, 100, _VALID, 0.7, True, True


def _vocab_gradient(numbers: Numbers) -> tuple[Any, ...]:
    logits, targets, others = _logits(numbers)
    totals = [(0.7 * x.float()).logsumexp(1) for x in (logits, others)]
    terms = [numbers(3).float() for _ in range(5)]
    return logits, targets, others, *totals, *terms, 100, _VALID, 0.7


EXAMPLES: dict[str, Callable[[Numbers], tuple[Any, ...]]] = {
    "rms_norm": lambda x: (x(5, 96), x(96), 1e-6),
    "rms_norm_backward": lambda x: (x(40, 96), x(40, 96), x(96), x(40).float().abs()),
    "add_rms_norm": lambda x: (x(5, 96), x(5, 96), x(96), 1e-6),
    "gated": lambda x: (x(3, 2 * 1030),),
    "gated_backward": lambda x: (x(3, 1030), x(3, 2 * 1030)),
    "rotate": lambda x: (x(5, 2, _GROUP + 2, _DIM)[:, :, :-2], *_angles(x, 5), True),
    "rotate_store": _rotate_store,
    "paged_attention": _paged_attention,
    "draw": _draw,
    "vocab_sums": _vocab_sums,
    "vocab_gradient": _vocab_gradient,
}


def largest_gap(
    kernel: Callable[..., Any], form: Callable[..., Any], name: str, numbers: Numbers
) -> float:
    """Call both on copies of the example; the largest difference over the largest number."""
    arguments = EXAMPLES[name](numbers)
    found, wanted = (_tensors_after(function, arguments) for function in (kernel, form))
    gaps = []
    for mine, theirs in zip(found, wanted, strict=True):
        gap = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        gaps.append(float(gap))
    return max(gaps)


def _tensors_after(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    copies = [part.clone() if isinstance(part, Tensor) else part for part in arguments]
    returned = function(*copies)
    results = [returned] if isinstance(returned, Tensor) else list(returned or ())
    return results + [part for part in copies if isinstance(part, Tensor)]
