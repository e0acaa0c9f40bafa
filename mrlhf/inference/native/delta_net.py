"""The gated delta net of a layer, with states of sequences in slots, for all kinds of passes.

Sequences with one new token go on by the rule for a token, others by chunks, so that a response
does not depend on what else a pass computes, but for rounding. It knows flat tokens and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.device import send
from mrlhf.gpu.library import operator, serves
from mrlhf.inference.native.linear import Linear
from mrlhf.inference.native.operators import Layer, StepInputs, add_norm
from mrlhf.models.delta_rule import (
    Chunks,
    chunked,
    convolve,
    gated_norm,
    gates_of,
    heads_of,
    one_token,
    split_projections,
)
from mrlhf.models.spec import DeltaNet


@dataclass(frozen=True)
class DeltaLayer:
    """The delta net of one layer on one rank, which has some of the heads."""

    net: DeltaNet
    eps: float  # added to the mean square in every norm
    norm: Tensor  # weight of the norm before it, [hidden]
    qkvz: Linear  # x -> for each key head its q, its k, and v and z of its value heads
    ba: Linear  # x -> for each key head b and a of its value heads
    taps: Tensor  # of the convolution, [channels, 1, taps]
    log_rate: Tensor  # A_log, [value_heads]
    bias: Tensor  # dt_bias, [value_heads]
    output_norm: Tensor  # [value_dim]
    proj: Linear  # the output projection

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, inputs: StepInputs, store: Layer
    ) -> Tensor:
        """Add `delta` to `hidden` in place; return this rank's share of the net of its norm."""
        normed = add_norm(hidden, delta, self.norm, self.eps)
        qkvz, ba = self.qkvz(normed), self.ba(normed)
        slots, lengths = inputs.slots, inputs.mask.lengths
        assert slots is not None
        if inputs.mask.most_queries == 1:
            return self.proj(self._step(qkvz, ba, slots, lengths, store))

        split = _Split.of(inputs.counts, qkvz.device)
        outputs = qkvz.new_empty(len(qkvz), self.log_rate.numel() * self.net.value_dim)
        if len(split.single_rows):
            rows, chosen = split.single_rows, split.singles
            outputs[rows] = self._step(qkvz[rows], ba[rows], slots[chosen], lengths[chosen], store)
        rows, chosen = split.rows, split.longer
        is_new = lengths[chosen] == split.counts
        outputs[rows] = self._go_on(qkvz[rows], ba[rows], slots[chosen], is_new, split, store)
        return self.proj(outputs)

    def _step(
        self, qkvz: Tensor, ba: Tensor, slots: Tensor, lengths: Tensor, store: Layer
    ) -> Tensor:
        """Return the gated outputs of sequences that have one token each, [sequences, values]."""
        weights = (self.taps, self.log_rate, self.bias, self.output_norm, self.eps)
        compute = _delta_step if serves(qkvz) else _delta_step_by_torch
        return compute(qkvz, ba, *weights, slots, lengths, *store)

    def _go_on(
        self, qkvz: Tensor, ba: Tensor, slots: Tensor, is_new: Tensor, split: _Split, store: Layer
    ) -> Tensor:
        """Return the gated outputs of all longer sequences of `split`, [tokens, values]."""
        x, z, numbers = split_projections(self.net, qkvz, ba)
        windows = store[0][slots].masked_fill(is_new[:, None, None], 0)
        states = store[1][slots].masked_fill(is_new[:, None, None, None], 0)
        convolved = convolve(x, self.taps, windows.unbind(), split.lengths)
        parts = zip(windows.unbind(), x.split(split.lengths), strict=True)
        store[0][slots] = torch.stack([torch.cat(pair)[-windows.shape[1] :] for pair in parts])
        gates = gates_of(numbers, self.log_rate, self.bias)
        outputs, store[1][slots] = chunked(
            *heads_of(self.net, convolved), gates, split.chunks, states
        )
        return gated_norm(outputs, z, self.output_norm, self.eps).flatten(1)


@dataclass(frozen=True)
class _Split:
    """The sequences of a pass that have one token, and those that have more; there is one."""

    singles: Tensor  # int64, as all tensors here
    single_rows: Tensor  # places of their tokens
    longer: Tensor
    rows: Tensor  # places of the tokens of longer sequences
    lengths: list[int]  # of longer sequences: tokens in this pass
    counts: Tensor  # the same
    chunks: Chunks

    @staticmethod
    @lru_cache(maxsize=1)  # all layers of a pass split it alike
    def of(counts: tuple[int, ...], device: torch.device) -> _Split:
        """Split sequences that have so many tokens."""
        tokens = torch.tensor(counts)
        is_single = tokens == 1
        of_single = is_single.repeat_interleave(tokens)
        lengths = tokens[~is_single].tolist()
        places = (x.nonzero()[:, 0] for x in (is_single, of_single, ~is_single, ~of_single))
        on_device = (send(part, device) for part in (*places, tokens[~is_single]))
        singles, single_rows, longer, rows, longer_counts = on_device
        chunks = Chunks.of_lengths(tuple(lengths), device)
        return _Split(singles, single_rows, longer, rows, lengths, longer_counts, chunks)


def _delta_step_by_torch(
    qkvz: Tensor, ba: Tensor, taps: Tensor, log_rate: Tensor, bias: Tensor, norm: Tensor,
    eps: float, slots: Tensor, lengths: Tensor, windows: Tensor, states: Tensor,
) -> Tensor:  # fmt: skip
    """`mrlhf.gpu.launch.delta_step` on torch's operators."""
    net = _net_of(qkvz, states.shape)
    x, z, numbers = split_projections(net, qkvz, ba)
    is_new = (lengths == 1)[:, None, None]
    seen = torch.cat([windows[slots].masked_fill(is_new, 0), x[:, None]], dim=1)
    windows[slots] = seen[:, 1:]
    convolved = (seen.float() * taps[:, 0].t().float()).sum(dim=1).to(x.dtype)

    before = states[slots].masked_fill(is_new[..., None], 0)
    q, k, v = heads_of(net, F.silu(convolved))
    outputs, states[slots] = one_token(q, k, v, gates_of(numbers, log_rate, bias), before)
    return gated_norm(outputs, z, norm, eps).flatten(1)


def _net_of(qkvz: Tensor, states: Sequence[int]) -> DeltaNet:
    """The heads of this rank, by its projections and the shape of its states."""
    _, value_heads, key_dim, value_dim = states
    key_heads = (qkvz.shape[1] - 2 * value_heads * value_dim) // (2 * key_dim)
    return DeltaNet((), key_heads, value_heads, key_dim, value_dim, taps=0)


_delta_step = operator(
    "delta_step(Tensor qkvz, Tensor ba, Tensor taps, Tensor log_rate, Tensor bias, Tensor norm, "
    "float eps, Tensor slots, Tensor lengths, Tensor(a!) windows, Tensor(b!) states) -> Tensor",
    _delta_step_by_torch,
)
