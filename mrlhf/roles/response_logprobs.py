"""Log-probabilities of whole responses under one language model: sums over the tokens of each.

The sums are float64, so that a long response loses nothing. It does not know losses, nor what
sequences are compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.data.preferences import PreferenceRows
from mrlhf.parallel.packs import Pack, gather_rows, lay_in_rows
from mrlhf.parallel.vocab import LossParts, Tokens
from mrlhf.parallel.vocab_sums import NumbersToCompute
from mrlhf.roles.token_logprobs import TokenLogprobs
from mrlhf.training.engine import ModelEngine

_PAIRS_AT_ONCE = 4096  # whose tables of tokens are in host memory together

ResponseObjective = Callable[[slice, Tensor], Tensor]
"""Takes some rows of a pack and the log-probabilities of their responses, float64 [rows], which
have gradients; gives their loss, a scalar."""


@dataclass(frozen=True)
class ResponseLogprobs:
    """Turns the hidden states of one language model into a number for each response."""

    engine: ModelEngine  # holds the model

    def of_pairs(self, pairs: PreferenceRows) -> Tensor:
        """Run the model over both sides of all pairs, float64 [pairs, 2] on every rank's host."""
        parts = []
        for begin in range(0, len(pairs), _PAIRS_AT_ONCE):
            rows = range(begin, min(begin + _PAIRS_AT_ONCE, len(pairs)))
            sequences = pairs.sequences(rows)
            packs = self.engine.cut(sequences, "response", together=2).packs
            shape = (len(sequences), sequences.width)
            logprobs = self._token_logprobs.of_batch(packs, shape)
            parts.append(logprobs.sum(dim=1, dtype=torch.float64).view(-1, 2))
        return torch.cat(parts)

    def loss(
        self, hidden: Tensor, pack: Pack, objective: ResponseObjective, together: int
    ) -> Tensor:
        """A loss of the log-probabilities of whole responses, a scalar with gradients.

        All ranks that share the sequences evaluate the objective on the same numbers. Each has the
        gradient through its own tokens, whose `hidden` is [selected, hidden]. The objective always
        gets all of `together` consecutive rows.
        """
        units = len(pack.rows) // together
        counts = pack.rank_counts.view(pack.segments.size, units, together).sum(dim=2)
        tokens = Tokens(
            hidden,
            pack.targets,
            lengths=counts[pack.segments.rank].tolist(),
            most_lengths=counts.amax(dim=0).tolist(),
        )

        layer = self._token_logprobs.layer
        parts = LossParts(layer, tokens, NumbersToCompute(), by_token=False)
        for part in parts:
            rows = slice(part.rows.start * together, part.rows.stop * together)
            parts.add(part, objective(rows, self._sums(part.numbers.logprobs, pack, rows)))
        return parts.total()

    @property
    def _token_logprobs(self) -> TokenLogprobs:
        return TokenLogprobs(self.engine, temperature=1.0)

    def _sums(self, logprobs: Tensor, pack: Pack, rows: slice) -> Tensor:
        """The sum over each of these rows, from the log-probabilities of this rank's tokens of
        them.
        """
        [whole] = gather_rows(logprobs[None], pack, self.engine.groups.cp, rows)
        counts = pack.row_counts[rows]
        longest = max(counts.tolist(), default=0)
        return lay_in_rows(whole.double(), counts, longest).sum(dim=1)
