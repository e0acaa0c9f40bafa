"""The gated delta net of a layer, with states of sequences in slots, for all kinds of passes.

Sequences with one new token go on by the rule for a token, others by chunks, so that a response
does not depend on what else a pass computes, but for rounding. It knows flat tokens and slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.inference.native.linear import Linear
from mrlhf.inference.native.operators import Layer, StepInputs, add_norm
from mrlhf.models.delta_rule import (
    Chunks,
    Gates,
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
        x, z, numbers = split_projections(self.net, self.qkvz(normed), self.ba(normed))
        gates = gates_of(numbers, self.log_rate, self.bias)
        outputs = z.new_empty(z.shape, dtype=torch.float32)

        counts = inputs.mask.query_edges.diff()
        lengths = counts.tolist()
        singles = [number for number, length in enumerate(lengths) if length == 1]
        others = [number for number, length in enumerate(lengths) if length > 1]
        for part in filter(None, (singles, others)):
            sequences = torch.tensor(part, device=x.device)
            chosen = torch.zeros(len(lengths), dtype=torch.bool, device=x.device)
            chosen[sequences] = True
            rows = chosen.repeat_interleave(counts, output_size=len(x)).nonzero()[:, 0]
            assert inputs.slots is not None
            slots = inputs.slots[sequences]
            is_new = (inputs.mask.lengths[sequences] == counts[sequences])[:, None, None]
            windows = store[0][slots].masked_fill(is_new, 0)
            states = store[1][slots].masked_fill(is_new[..., None], 0)

            own = Gates(gates.log_decay[rows], gates.rate[rows])
            own_lengths = [lengths[number] for number in part]
            computed = self._advance(x[rows], own, own_lengths, windows, states)
            outputs[rows], store[0][slots], store[1][slots] = computed
        return self.proj(gated_norm(outputs, z, self.output_norm, self.eps).flatten(1))

    def _advance(
        self, x: Tensor, gates: Gates, lengths: list[int], windows: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of sequences, all of one token or all longer, and what they keep."""
        convolved = convolve(x, self.taps, windows.unbind(), lengths)
        parts = zip(windows.unbind(), x.split(lengths), strict=True)
        kept = torch.stack([torch.cat(pair)[-windows.shape[1] :] for pair in parts])
        q, k, v = heads_of(self.net, convolved)
        if lengths[0] == 1:
            outputs, states = one_token(q, k, v, gates, states)
        else:
            outputs, states = chunked(q, k, v, gates, Chunks.of_lengths(lengths, x.device), states)
        return outputs, kept, states
