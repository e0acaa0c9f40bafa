"""One response as the terms of the reward read it, taken from a rollout or from a replica.

It does not know what a term is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mrlhf.batch import Prompts, Rollout
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.rewards.interface import PlacedValue, RewardInput
from mrlhf.rollout.drawn_sample import DrawnSample


@dataclass(frozen=True)
class Response:
    """All that decides the scores of a response, so equal ones have equal scores."""

    data_source: str
    prompt_text: str
    ground_truth: Any
    extra_info: Mapping[str, Any]  # the rest of the prompt's row
    token_ids: array[int]  # int32
    # the places of the tokens that the policy drew last in an episode; None without an environment
    last_turn: range | None

    @staticmethod
    def of_row(rollout: Rollout, row: int, length: int) -> Response:
        """The response at `row`, which has `length` tokens."""
        token_ids = array("i", rollout.response_ids[row, :length].tolist())
        last_turn = None if rollout.episodes is None else rollout.episodes[row].last_turn
        return _response(rollout.prompts, row, token_ids, last_turn)

    @staticmethod
    def of_sample(sample: DrawnSample, prompts: Prompts, prompt: int) -> Response:
        """A response that has ended, to the prompt at place `prompt`, and not as a failure."""
        token_ids = sample.token_ids
        episode = sample.episode
        if episode is None:
            return _response(prompts, prompt, token_ids, None)

        begun = prompts.select([prompt]).begun_as([episode])
        return _response(begun, 0, token_ids, episode.last_turn)

    def places(self, placed: Sequence[PlacedValue], tokenizer: Tokenizer) -> list[int]:
        """The token of each value, counted among all of the response.

        The token of a character is the one that completes it, since a character may be spread over
        several; its offset counts in the text that `read` gives.
        """
        token_ids = self.token_ids.tolist()
        begin = 0
        if self.last_turn is not None:
            begin = self.last_turn.start
            token_ids = token_ids[begin : self.last_turn.stop]
        text = tokenizer.decode(token_ids)

        @cache
        def agreeing(tokens: int) -> int:
            """How many characters the text of the first `tokens` tokens has in common with it."""
            part = tokenizer.decode(token_ids[:tokens])
            pairs = zip(text, part, strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), len(part))

        def characters(tokens: int) -> int:
            # Some tokenizers decode no byte before a character of which up to 3 bytes are there.
            return max(map(agreeing, range(max(tokens - 3, 0), tokens + 1)))

        counts = range(1, len(token_ids) + 1)
        return [
            place if unit == "token" else begin + bisect_right(counts, place, key=characters)
            for unit, place, _ in placed
        ]

    def read(self, tokenizer: Tokenizer, reads_text: bool) -> RewardInput:
        """The terms' input; the response is decoded if a term `reads_text`."""
        text = ""
        extra_info = self.extra_info
        if reads_text:
            token_ids = self.token_ids.tolist()
            if self.last_turn is not None:
                transcript = tokenizer.decode(token_ids, skip_special_tokens=False)
                extra_info = {**extra_info, "transcript": transcript}
                token_ids = token_ids[self.last_turn.start : self.last_turn.stop]
            text = tokenizer.decode(token_ids)

        return RewardInput(
            data_source=self.data_source,
            prompt_text=self.prompt_text,
            solution_str=text,
            ground_truth=self.ground_truth,
            extra_info=extra_info,
            response_tokens=len(self.token_ids),
        )


def _response(
    prompts: Prompts, place: int, token_ids: array[int], last_turn: range | None
) -> Response:
    return Response(
        data_source=prompts.data_source[place],
        prompt_text=prompts.text[place],
        ground_truth=prompts.ground_truth[place],
        extra_info=prompts.extra_info[place],
        token_ids=token_ids,
        last_turn=last_turn,
    )
