"""The token ids of the samples that are being decoded, one row each, on the host.

When a sample has ended, its row number is free for another. This file does not know models, or
which row runs next.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrlhf.errors import EngineError
from mrlhf.inference.base import MaskWords, Request, Sample, SamplingParams, response_so_far
from mrlhf.inference.native import sampler
from mrlhf.inference.native.rows import RowNumbers, enlarged
from mrlhf.inference.stopping import Decode, StopSearch
from mrlhf.records import as_words

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class DrawnSequences:
    """Prompts with the tokens drawn so far.

    `max_tokens` and the seed are each request's own, not those of `sampling`. `decode` is needed
    for stop strings. Weights of this `version` draw the tokens.
    """

    def __init__(self, sampling: SamplingParams, decode: Decode | None, version: int) -> None:
        assert not sampling.stop or decode is not None, "stop strings need a decoder"
        self._decode = decode
        self._version = version
        self._stop = sampling.stop
        self._stop_tokens = np.array(sampling.stop_token_ids, dtype=np.int64)

        self._numbers = RowNumbers()
        self._owners: dict[int, tuple[Any, int]] = {}  # request and sample index of each row
        self._searches: dict[int, StopSearch] = {}  # of each row, if there are stop strings
        self.recorded: set[int] = set()  # rows whose samples say which experts they went to
        self._masks: dict[int, MaskWords] = {}  # of each row, if they are recorded
        self._head = sampling.record_head
        self._going_on: set[int] = set()  # rows with which the prompt of a later request begins
        self._keys = np.zeros(0, dtype=np.uint64)
        self._tokens = np.zeros((0, 0), dtype=np.int32)
        self._logprobs = np.zeros((0, 0), dtype=np.float32)
        self._prompt_lengths = np.zeros(0, dtype=np.int64)
        self._drawn_before = np.zeros(0, dtype=np.int64)  # tokens of the response in the prompt
        self._max_tokens = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.int64)
        self._stopped = np.zeros(0, dtype=np.bool_)

    def add(self, requests: Sequence[Request]) -> list[list[int]]:
        """Take in the samples of each request, and return their rows."""
        rows_of = [self._numbers.take(len(request.samples)) for request in requests]
        every = [row for rows in rows_of for row in rows]
        if not every:
            return rows_of
        self._make_room(requests, 1 + max(every))

        self._keys[every] = sampler.sample_keys(
            [request.sampling.seed for request in requests],
            [request.uid for request in requests],
            [request.samples for request in requests],
        )
        self._counts[every] = 0
        self._stopped[every] = False
        for request, rows in zip(requests, rows_of, strict=True):
            self._tokens[rows, : len(request.prompt)] = request.prompt
            self._prompt_lengths[rows] = len(request.prompt)
            self._drawn_before[rows] = request.drawn
            self._max_tokens[rows] = request.sampling.max_tokens
            if request.sampling.record_experts:
                self.recorded.update(rows)
            if request.sampling.record_masks or request.sampling.record_head:
                self._masks.update((row, MaskWords.none(0)) for row in rows)
            if request.goes_on:
                self._going_on.update(rows)
            for row, index in zip(rows, request.samples, strict=True):
                self._owners[row] = (request.id, index)
                if self._stop:
                    assert self._decode is not None
                    before = response_so_far(request)
                    self._searches[row] = StopSearch(self._decode, self._stop, before)
        return rows_of

    def tokens_at(self, rows: Ints, positions: Ints) -> Ints:
        """The tokens [tokens] of `rows` at `positions`, prompts included."""
        return self._tokens[rows, positions].astype(np.int64)

    def uniforms(self, rows: Ints, positions: Ints) -> Floats:
        """The numbers in [0, 1) that pick the tokens of `rows` at `positions`, [batch]."""
        places = self._drawn_before[rows] + positions - self._prompt_lengths[rows]
        return sampler.uniforms(self._keys[rows], places)

    def record(
        self,
        rows: Ints,
        tokens: Ints,
        logprobs: NDArray[np.float32],
        octets: NDArray[np.uint8] | None = None,
    ) -> list[int]:
        """Append one token to each of `rows`, and return the rows that ended with it.

        `octets` record the distribution of each, if that is asked for; see `as_words`.

        Raises:
            EngineError: a log-probability is not finite.
        """
        if not np.isfinite(logprobs).all():
            raise EngineError(
                "the policy's logits are not finite: its weights, or what it computes with them, "
                "hold NaN or inf; before the first update look at the model's files, and later "
                "lower the learning rate"
            )
        counts = self._counts[rows]
        self._tokens[rows, self._prompt_lengths[rows] + counts] = tokens
        self._logprobs[rows, counts] = logprobs
        self._counts[rows] = counts + 1
        if octets is not None:
            for row, words in zip(rows.tolist(), as_words(octets, self._head), strict=True):
                self._masks[row].words.frombytes(words.tobytes())
                self._masks[row].counts.append(len(words))

        # np.isin takes many times as long for so few tokens.
        stopped = (tokens[:, None] == self._stop_tokens).any(axis=1)
        if self._stop:
            drawn = zip(rows.tolist(), tokens.tolist(), strict=True)
            stopped |= [self._searches[row].append(token) for row, token in drawn]
        self._stopped[rows] = stopped
        ended: list[int] = rows[stopped | (counts + 1 == self._max_tokens[rows])].tolist()
        return ended

    def goes_on(self, row: int) -> bool:
        """Whether the prompt of a later request may begin with this row."""
        return row in self._going_on

    def tokens_of(self, row: int) -> list[int]:
        """The prompt of a row, and what was drawn."""
        length = self._prompt_lengths[row] + self._counts[row]
        tokens: list[int] = self._tokens[row, :length].tolist()
        return tokens

    def drawn_so_far(self) -> dict[int, list[int]]:
        """The tokens drawn for each row that has not ended."""
        return {row: self.tokens_of(row)[self._prompt_lengths[row] :] for row in self._owners}

    def remove(self, row: int, experts: NDArray[Any] | None = None) -> Sample:
        """Return the sample of a row that has ended, with its tokens' experts, and free the row."""
        request_id, sample_index = self._owners.pop(row)
        self._searches.pop(row, None)
        self.recorded.discard(row)
        self._going_on.discard(row)
        self._numbers.give_back(row)

        start = self._prompt_lengths[row]
        count = self._counts[row]
        tokens = self._tokens[row, start : start + count]
        return Sample(
            request_id=request_id,
            sample_index=sample_index,
            token_ids=array("i", tokens.tobytes()),
            logprobs=array("f", self._logprobs[row, :count].tobytes()),
            stopped=bool(self._stopped[row]),
            version=self._version,
            experts=experts,
            masks=self._masks.pop(row, None),
        )

    def _make_room(self, requests: Sequence[Request], rows: int) -> None:
        """Let the arrays have at least `rows` rows, wide enough for the longest sequence."""
        max_tokens = max(request.sampling.max_tokens for request in requests)
        longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests)
        self._keys = enlarged(self._keys, rows)
        self._tokens = enlarged(self._tokens, rows, longest)
        self._logprobs = enlarged(self._logprobs, rows, max_tokens)
        self._prompt_lengths = enlarged(self._prompt_lengths, rows)
        self._drawn_before = enlarged(self._drawn_before, rows)
        self._max_tokens = enlarged(self._max_tokens, rows)
        self._counts = enlarged(self._counts, rows)
        self._stopped = enlarged(self._stopped, rows)
