"""A judge on the ranks: a frozen model whose own engine answers messages about responses.

All ranks call it together, and each replica of the engine answers its share. It does not know what
a message or an answer means, nor what a score is used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import xxhash

from mrlhf.batch import Prompts
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.inference.base import SamplingParams
from mrlhf.rewards.interface import RewardInput, Scored
from mrlhf.rewards.judge import Judge, win_rates
from mrlhf.rollout.generator import Generator


@dataclass(frozen=True)
class RankJudge:
    """Scores responses; its engine has memory only while it does."""

    judge: Judge
    generator: Generator
    sampling: SamplingParams
    tokenizer: Tokenizer  # the judge's own
    max_prompt_tokens: int

    def score(self, inputs: Sequence[RewardInput], groups: Sequence[int]) -> list[Scored]:
        """The score of each response, on every rank; RewardError if one must not lack a verdict.

        Responses with the same number in `groups` answer one prompt, and may be compared.
        """
        if not self.judge.compares:
            return self._ask(inputs, [self.judge.message(row) for row in inputs])
        rows_of: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            rows_of.setdefault(group, []).append(row)
        pairs = [pair for rows in rows_of.values() for pair in permutations(rows, 2)]
        texts = [self.judge.message(inputs[row], inputs[other]) for row, other in pairs]
        verdicts = self._ask([inputs[row] for row, _ in pairs], texts)
        return win_rates(len(inputs), pairs, verdicts)

    def _ask(self, inputs: Sequence[RewardInput], texts: Sequence[str]) -> list[Scored]:
        """The verdict on each message, which is about the response beside it."""
        n = self.sampling.n
        tokens = [self._encode(text) for text in texts]
        asked = [row for row, ids in enumerate(tokens) if len(ids) <= self.max_prompt_tokens]
        answers = [[""] * n for _ in inputs]
        if asked:
            self.generator.lengths.clear()  # they would make the shares depend on the past
            self.generator.take_weights(version=0)
            # Equal messages draw equal numbers, in whatever step and batch.
            uids = [xxhash.xxh3_64_intdigest(text.encode()) >> 1 for text in texts]
            nothing = [""] * len(texts)
            prompts = Prompts(tokens, uids, [*texts], nothing, [*nothing], [{} for _ in texts])
            prompts = prompts.select(asked)
            rollout = self.generator.generate(prompts, self.sampling, "judge").rollout
            self.generator.sleep()
            for place, length in enumerate(rollout.response_lengths):
                answer = self.tokenizer.decode(rollout.response_ids[place, :length].tolist())
                answers[asked[place // n]][place % n] = answer
        return [self.judge.read(own, row) for own, row in zip(answers, inputs, strict=True)]

    def _encode(self, message: str) -> list[int]:
        chat = self.tokenizer.has_chat_template
        prompt = [{"role": "user", "content": message}] if chat else message
        return self.tokenizer.encode_prompt(prompt)[1]
