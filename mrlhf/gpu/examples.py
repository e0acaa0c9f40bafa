"""A small call of each operator, on which its kernel is compared with its torch form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Callable[..., Any]
Numbers = Callable[..., Tensor]
"""Random numbers of the given shape, on the device and of the dtype that is tried."""

# Operators that only an engine needs: on pages of the KV cache, and on experts.
OF_ENGINE = ("rotate_store", "paged_attention", "sort_by_expert", "join_experts", "delta_step")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that decide on the form in which a kernel is compiled."""

    dim: int = 32  # of a head
    group: int = 2  # query heads for each KV head
    hidden: int = 96
    page: int = 16  # tokens; 0 without a KV cache
    dtype: torch.dtype = torch.bfloat16
    has_wide_norms: bool = False  # whether weights of norms are float32
    # of a delta net: value heads of a key head, key_dim, value_dim and taps; None if there is none
    delta: tuple[int, int, int, int] | None = (2, 16, 24, 4)
    caps: bool = False  # whether scores of attention have a cap
    # of latent attention: its heads, numbers of a latent, and those that are rotated beside it
    latent: tuple[int, int, int] | None = None

    def use(self, name: str) -> bool:
        """Whether the model needs this operator."""
        if name == "delta_step" and self.delta is None:
            return False
        return bool(self.page) or name not in OF_ENGINE


_LENGTHS = (40, 3)  # of two sequences


def _angles(numbers: Numbers, rows: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    rotated = max(1, sizes.dim // 2 - 4)  # pairs; the last 8 dimensions are not rotated
    angles = numbers(rows, rotated).float()
    return angles.cos(), angles.sin()


def _pages(numbers: Numbers, sizes: Sizes) -> list[Tensor]:
    """Keys and values of two sequences that are as long as the longer one, of two KV heads."""
    blocks = 2 * -(-max(_LENGTHS) // sizes.page)
    return [numbers(blocks, sizes.page, 2, sizes.dim) for _ in range(2)]


def _weights(numbers: Numbers, sizes: Sizes, *shape: int) -> Tensor:
    """Weights of norms."""
    return numbers(*shape).float() if sizes.has_wide_norms else numbers(*shape)


def _rotate_store(numbers: Numbers, sizes: Sizes) -> tuple[Any, ...]:
    tables = _angles(numbers, max(_LENGTHS), sizes)
    device = tables[0].device
    positions = torch.tensor([length - 1 for length in _LENGTHS], device=device)
    places = torch.tensor([5, 70], device=device)
    norms = _weights(numbers, sizes, 2, sizes.dim).unbind()
    qkv = numbers(2, 2, sizes.group + 2, sizes.dim)
    return qkv, *norms, 1e-6, *tables, positions, places, *_pages(numbers, sizes)


def _paged_attention(
    numbers: Numbers,
    sizes: Sizes,
    queries: int = 4,
    longest: int = max(_LENGTHS),
    window: int = 7,
    has_sinks: bool = False,
) -> tuple[Any, ...]:
    keys, values = _pages(numbers, sizes)
    q = numbers(queries + 1, 2 * sizes.group, sizes.dim)
    if sizes.latent is not None:
        heads, rank, rotated = sizes.latent
        keys = numbers(len(keys), sizes.page, 1, rank + rotated)
        values = keys[..., :rank]
        q = numbers(queries + 1, heads, rank + rotated)
    tables = torch.arange(len(keys), dtype=torch.int32, device=keys.device).view(2, -1)
    edges = torch.tensor([0, queries, queries + 1], dtype=torch.int32, device=keys.device)
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=keys.device)
    scale = 1.7 * q.shape[-1] ** -0.5
    sinks = numbers(q.shape[1]) if has_sinks else None
    cap = 2.0 if sizes.caps else 0.0
    return q, keys, values, tables, edges, lengths, queries, longest, window, scale, sinks, cap


def _decoding(numbers: Numbers, sizes: Sizes, has_sinks: bool = False) -> tuple[Any, ...]:
    """Attention of one token of each sequence, whose keys are read in parts."""
    return _paged_attention(numbers, sizes, queries=1, longest=1024, window=0, has_sinks=has_sinks)


_COLUMNS = 1024  # of a block of logits


def _draw(numbers: Numbers, sizes: Sizes) -> tuple[Any, ...]:
    """On the second of two ranks: the first has the token of the first of four rows."""
    logits = numbers(4, 3000).float()
    blocks = F.pad(2.5 * logits, (0, 72), value=-torch.inf).unflatten(1, (3, _COLUMNS))
    tops = blocks.amax(2)
    sums = (blocks - tops[:, :, None]).exp().sum(2)
    summaries = torch.stack([torch.stack([tops - 1, sums]), torch.stack([tops, sums])])
    uniform = torch.tensor([0.0, 0.4, 0.999, -1.0], dtype=torch.float64, device=logits.device)
    drawn = torch.zeros_like(uniform, dtype=torch.int64), torch.zeros_like(logits[:, 0])
    return logits, 2.5, summaries, uniform, 1, 3000, _COLUMNS, *drawn


def _delta_step(numbers: Numbers, sizes: Sizes) -> tuple[Any, ...]:
    """Three sequences of two key heads, of which one begins."""
    assert sizes.delta is not None
    shared, key_dim, value_dim, taps = sizes.delta
    values = 2 * shared * value_dim
    channels = 4 * key_dim + values
    qkvz = numbers(3, channels + values)
    slots, lengths = torch.tensor([[3, 0, 2], [9, 5, 1]], device=qkvz.device)
    return (
        qkvz, numbers(3, 4 * shared), numbers(channels, 1, taps), *numbers(2, 2 * shared),
        numbers(value_dim), 1e-6, slots, lengths.int(), numbers(4, taps - 1, channels),
        numbers(4, 2 * shared, key_dim, value_dim).float(),
    )  # fmt: skip


_VALID = 1500  # of the columns of logits


def _logits(numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of 3 tokens, their targets, of which one is on another rank, and other logits."""
    logits, others = numbers(2, 3, 1600).float()
    return logits, torch.tensor([107, 1400, 30], device=logits.device), others


def _vocab_sums(numbers: Numbers, sizes: Sizes) -> tuple[Any, ...]:
    table = numbers(8, 3).float()
    return table, *_logits(numbers), 100, _VALID, 0.7, True, True, False


def _vocab_gradient(numbers: Numbers, sizes: Sizes) -> tuple[Any, ...]:
    logits, targets, others = _logits(numbers)
    totals = [(0.7 * x.float()).logsumexp(1) for x in (logits, others)]
    terms = [numbers(3).float() for _ in range(5)]
    return logits, targets, others, *totals, *terms, 100, _VALID, 0.7, 1.0


EXAMPLES: dict[str, Callable[[Numbers, Sizes], tuple[Any, ...]]] = {
    "rms_norm": lambda x, s: (x(5, s.hidden), _weights(x, s, s.hidden), 1e-6),
    "rms_norm_backward": lambda x, s: (
        x(40, s.hidden), x(40, s.hidden), _weights(x, s, s.hidden), x(40).float().abs(),
    ),
    "add_rms_norm": lambda x, s: (
        x(5, s.hidden), x(5, s.hidden), _weights(x, s, s.hidden), 1e-6,
    ),
    "gated": lambda x, s: (x(3, 2 * 1030),),
    "gated_backward": lambda x, s: (x(3, 1030), x(3, 2 * 1030)),
    "rotate": lambda x, s: (x(5, 2, s.group + 2, s.dim)[:, :, :-2], *_angles(x, 5, s), True),
    "rotate_store": _rotate_store,
    "paged_attention": _paged_attention,
    "logit_blocks": lambda x, s: (x(4, 3000).float(), 2.5, 3, _COLUMNS),
    "draw": _draw,
    "sort_by_expert": lambda x, s: ((3 * x(5, 2).abs()).long(), 2, 4),
    "join_experts": lambda x, s: (
        x(6, s.hidden), x(6).argsort().int(), 2 + x(4).argsort().int(), x(3, 2).float(),
    ),
    "delta_step": _delta_step,
    "vocab_sums": _vocab_sums,
    "vocab_gradient": _vocab_gradient,
}  # fmt: skip
_FURTHER = {
    "paged_attention": [
        _decoding, partial(_decoding, has_sinks=True), partial(_paged_attention, has_sinks=True),
    ]
}  # fmt: skip


def largest_gap(kernel: Form, form: Form, name: str, numbers: Numbers, sizes: Sizes) -> float:
    """Call both on copies of the examples; the largest difference over the largest number."""
    gaps = []
    for example in (EXAMPLES[name], *_FURTHER.get(name, ())):
        arguments = example(numbers, sizes)
        found, wanted = (_tensors_after(function, arguments) for function in (kernel, form))
        gaps += [_gap(*pair) for pair in zip(found, wanted, strict=True)]
    return max(gaps)


def _gap(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def _tensors_after(function: Form, arguments: tuple[Any, ...]) -> list[Tensor]:
    copies = [part.clone() if isinstance(part, Tensor) else part for part in arguments]
    returned = function(*copies)
    results = [returned] if isinstance(returned, Tensor) else list(returned or ())
    return results + [part for part in copies if isinstance(part, Tensor)]
