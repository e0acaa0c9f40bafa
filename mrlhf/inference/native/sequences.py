"""The texts of one call of `generate`, by row, and the samples that they become; on the host.

Rows are samples, numbered prompt after prompt. It knows neither models nor who runs next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mrlhf.errors import EngineError
from mrlhf.inference.base import Sample, SamplingParams
from mrlhf.inference.native import sampler
from mrlhf.inference.stopping import Decode, end_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Sequences:
    """Prompts with the tokens drawn so far."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        uids: Sequence[int],
        samples: Sequence[range],
        sampling: SamplingParams,
        decode: Decode | None,
    ) -> None:
        """Args:
        prompts: token ids.
        uids: a number for each prompt, on which its random numbers depend.
        samples: sample indices of each prompt.
        sampling: when a response ends, and the seed.
        decode: text of token ids; needed for stop strings.
        """
        assert not sampling.stop or decode is not None, "stop strings need a decoder"
        self._sampling, self._decode = sampling, decode
        self._owners = [
            (prompt, index) for prompt, indices in enumerate(samples) for index in indices
        ]
        self._keys = sampler.sample_keys(sampling.seed, uids, samples)
        self._prompt_lengths = np.array(
            [len(prompts[prompt]) for prompt, _ in self._owners], dtype=np.int64
        )
        longest = max(map(len, prompts)) + sampling.max_tokens
        self._tokens = np.zeros((len(self._owners), longest), dtype=np.int32)
        for row, (prompt, _) in enumerate(self._owners):
            self._tokens[row, : len(prompts[prompt])] = prompts[prompt]
        self._counts = np.zeros(len(self._owners), dtype=np.int64)
        self._logprobs = np.zeros((len(self._owners), sampling.max_tokens), dtype=np.float32)
        self._stopped = np.zeros(len(self._owners), dtype=np.bool_)
        self._stop_tokens = np.array(sampling.stop_token_ids, dtype=np.int64)
        self._longest_stop = max(map(len, sampling.stop), default=0)

    def tokens_at(self, rows: Ints, positions: Ints) -> Ints:
        """The tokens [tokens] of `rows` at `positions`, prompts included."""
        return self._tokens[rows, positions].astype(np.int64)

    def uniforms(self, rows: Ints) -> Floats:
        """The number in [0, 1) that picks the next token of each of `rows`, [batch]."""
        return sampler.uniforms(self._keys[rows], self._counts[rows])

    def record(self, rows: Ints, tokens: Ints, logprobs: NDArray[np.float32]) -> list[int]:
        """Append one token to each of `rows`; those that ended are returned.

        Raises:
            EngineError: a log-probability is not finite.
        """
        if not np.isfinite(logprobs).all():
            raise EngineError(
                "the policy's logits are not finite: its weights hold NaN or inf; lower the learning rate"
            )
        counts = self._counts[rows]
        self._tokens[rows, self._prompt_lengths[rows] + counts] = tokens
        self._logprobs[rows, counts] = logprobs
        self._counts[rows] = counts + 1
        stopped = np.isin(tokens, self._stop_tokens)
        if self._sampling.stop:
            stopped |= np.fromiter(map(self._has_stop_string, rows.tolist()), np.bool_, len(rows))
        self._stopped[rows] = stopped
        ended: list[int] = rows[stopped | (counts + 1 == self._sampling.max_tokens)].tolist()
        return ended

    def samples(self) -> list[Sample]:
        """All samples, by prompt, then by sample."""
        return [
            Sample(
                prompt_index=prompt,
                sample_index=index,
                token_ids=self._response(row).tolist(),
                logprobs=self._logprobs[row, : self._counts[row]].tolist(),
                stopped=bool(self._stopped[row]),
            )
            for row, (prompt, index) in enumerate(self._owners)
        ]

    def _response(self, row: int) -> NDArray[np.int32]:
        start = self._prompt_lengths[row]
        response: NDArray[np.int32] = self._tokens[row, start : start + self._counts[row]]
        return response

    def _has_stop_string(self, row: int) -> bool:
        """Whether the newest token completes a stop string: looked for at the end, then made sure
        of on the whole.
        """
        assert self._decode is not None
        response = self._response(row).tolist()
        count = self._longest_stop
        # Tokens without text are passed over: the end that is looked at is longer than any stop
        # string.
        while len(
            text := self._decode(response[-count:])
        ) <= 2 * self._longest_stop and count < len(response):
            count *= 2
        if not any(string in text for string in self._sampling.stop):
            return False
        return end_of(response, self._decode, self._sampling.stop, start=len(response)) is not None
