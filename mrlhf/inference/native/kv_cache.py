"""Keys and values of the running sequences, one slot a sequence, grown as sequences grow.

Slots are rows of one tensor a layer, so that a decode step reads slots 0 .. batch - 1 as a view. It knows neither
models nor which sequence is in which slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROWTH = 128


class KVCache:
    """Keys and values, [2, slots, kv_heads, length, head_dim] a layer; what is not yet written is zero or stale.

    Growing copies one layer at a time, so the extra memory is that of one layer. Growth by 128 tokens costs little,
    since every decode step reads the whole cache anyway.
    """

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._kv_heads, self._head_dim = kv_heads, head_dim
        empty = torch.zeros(2, 0, kv_heads, 0, head_dim, device=device, dtype=dtype)
        self._layers = [empty] * num_layers

    @property
    def slots(self) -> int:
        """Sequences there is room for."""
        return self._layers[0].shape[1]

    @property
    def length(self) -> int:
        """Tokens a sequence there is room for."""
        return self._layers[0].shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self._layers)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens; what is in the cache stays."""
        if slots <= self.slots and length <= self.length:
            return
        slots, length = max(slots, self.slots), max(-(-length // _GROWTH) * _GROWTH, self.length)
        for number, old in enumerate(self._layers):
            new = old.new_zeros(2, slots, self._kv_heads, length, self._head_dim)
            new[:, : old.shape[1], :, : old.shape[3]] = old
            self._layers[number] = new

    def fill(self, layer: int, keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Write prompts: row `rows[i]` of `keys`, `values` [batch, kv_heads, seq_len, head_dim] to slot `slots[i]`."""
        seq_len = keys.shape[2]
        self._layers[layer][0, slots, :, :seq_len] = keys[rows]
        self._layers[layer][1, slots, :, :seq_len] = values[rows]

    def append(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write one token, `keys` and `values` [batch, kv_heads, head_dim], of slot i at `positions[i]`."""
        slots = torch.arange(len(positions), device=positions.device)
        self._layers[layer][0, slots, :, positions] = keys
        self._layers[layer][1, slots, :, positions] = values

    def view(self, layer: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` tokens of slots 0 .. batch - 1, [batch, kv_heads, length, head_dim]."""
        keys, values = self._layers[layer][:, :batch, :, :length]
        return keys, values

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `sources` over slots `targets`; no slot is in both."""
        for layer in self._layers:
            layer[:, targets] = layer[:, sources]
