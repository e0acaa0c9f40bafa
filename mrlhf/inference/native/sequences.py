"""The state of the running sequences, by slot, and the samples they become, by row; all tensors, no loop over tokens.

Rows are samples, numbered prompt * n + sample index. It knows neither models nor who runs next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrlhf.errors import EngineError
from mrlhf.inference.base import Sample, SamplingParams
from mrlhf.inference.native import sampler


class Sequences:
    """The samples of one call of `generate`."""

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        uids: Sequence[int],
        sampling: SamplingParams,
        slots: int,
        device: torch.device,
    ) -> None:
        rows = len(prompt_lengths) * sampling.n
        self._sampling, self._device = sampling, device
        self._stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self._keys = sampler.sample_keys(sampling.seed, uids, sampling.n, device)
        lengths = torch.tensor(list(prompt_lengths), dtype=torch.int64, device=device)
        self._prompt_lengths = lengths.repeat_interleave(sampling.n)
        # By slot: which row runs there, its last token, and how many it has.
        self._rows, self._last, self._counts = torch.zeros(3, slots, dtype=torch.int64, device=device)
        # By row: what it has become.
        self._tokens = torch.zeros(rows, sampling.max_tokens, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(rows, sampling.max_tokens, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def start(self, rows: Tensor, slots: Tensor) -> None:
        """Row `rows[i]` [started] begins in slot `slots[i]`; its prompt is computed, nothing is drawn yet."""
        self._rows[slots], self._counts[slots] = rows, 0

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """What ran in slots `sources` runs in slots `targets`; no slot is in both."""
        for state in (self._rows, self._last, self._counts):
            state[targets] = state[sources]

    def next_tokens(self, batch: int) -> tuple[Tensor, Tensor]:
        """The last token of each sequence in slots 0 .. batch - 1, and the position it has, int64 [batch] each."""
        rows, counts = self._rows[:batch], self._counts[:batch]
        return self._last[:batch], self._prompt_lengths[rows] + counts - 1

    def uniforms(self, slots: Tensor) -> Tensor:
        """The number in [0, 1) that picks the next token in each of `slots`, float64 [batch]."""
        return sampler.uniforms(self._keys[self._rows[slots]], self._counts[slots])

    def record(self, slots: Tensor, tokens: Tensor, logprobs: Tensor) -> list[int]:
        """Append one token to the sequence in each of `slots`; the slots of those that ended are returned."""
        rows, counts = self._rows[slots], self._counts[slots]
        self._tokens[rows, counts], self._logprobs[rows, counts] = tokens, logprobs
        self._last[slots], self._counts[slots] = tokens, counts + 1
        stopped = (tokens[:, None] == self._stop).any(dim=1)
        ended = stopped | (counts + 1 == self._sampling.max_tokens)
        ended_slots: list[int] = slots[ended].tolist()
        if ended_slots:
            self._lengths[rows[ended]], self._stopped[rows[ended]] = counts[ended] + 1, stopped[ended]
        return ended_slots

    def samples(self) -> list[Sample]:
        """All samples, by prompt, then by sample index.

        Raises:
            EngineError: a log-probability is not finite.
        """
        if not bool(self._logprobs.isfinite().all()):
            raise EngineError(
                "the policy's logits are not finite: its weights hold NaN or inf; lower the learning rate"
            )
        columns = (self._tokens.tolist(), self._logprobs.tolist(), self._lengths.tolist(), self._stopped.tolist())
        return [
            Sample(
                prompt_index=row // self._sampling.n,
                sample_index=row % self._sampling.n,
                token_ids=tokens[:length],
                logprobs=logprobs[:length],
                stopped=stopped,
            )
            for row, (tokens, logprobs, length, stopped) in enumerate(zip(*columns, strict=True))
        ]
