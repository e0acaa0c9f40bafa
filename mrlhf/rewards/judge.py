"""The message to a judge, and the score in its answers.

It does not know who answers: a server (`chat_judge`) or a model on the ranks (`rollout/judging`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from mrlhf.config.reward import JudgeSection
from mrlhf.config.row_template import row_template
from mrlhf.errors import ConfigError, RewardError
from mrlhf.rewards.interface import RewardInput, Scored

_VARIABLES = ("prompt", "response", "ground_truth", "data_source", "extra_info")
_COMPARED = (*_VARIABLES, "other")


class Judge:
    """Writes messages by the template, and reads verdicts by the pattern."""

    def __init__(self, section: JudgeSection) -> None:
        """Compile both; ConfigError if one is malformed."""
        self._section = section
        self._verdicts = {word.casefold(): score for word, score in section.verdicts.items()}
        self.compares = section.compares
        names = _COMPARED if self.compares else _VARIABLES
        self._template = row_template("judge.template", section.template, "response", names)
        try:
            self._pattern = re.compile(section.pattern)
        except re.error as error:
            raise ConfigError(f"judge.pattern is no regular expression: {error}") from None
        if self._pattern.groups != 1:
            raise ConfigError(
                f"judge.pattern {section.pattern!r} has {self._pattern.groups} groups; it should "
                "have one, as (...) and not (?:...), around the verdict"
            )

    def message(self, row: RewardInput, other: RewardInput | None = None) -> str:
        """The message about a response, beside an `other` if these are compared.

        A RewardError says that the template fails on it.
        """
        values = (row.prompt_text, row.solution_str, row.ground_truth, row.data_source)
        named = dict(zip(_VARIABLES, (*values, row.extra_info), strict=True))
        if other is not None:
            named["other"] = other.solution_str
        try:
            return self._template.render(named)
        except Exception as error:  # a template is a program, and may fail in any way
            raise RewardError(f"judge.template fails: {error}; on {row.title}") from error

    def read(self, answers: Sequence[str], row: RewardInput) -> Scored:
        """The mean score of the answers about a response; RewardError if one must not be unread."""
        default = self._section.unparsed
        votes = [self._verdict(answer) for answer in answers]
        stated = [default if vote is None else vote for vote in votes]
        scores = [score for score in stated if score is not None]
        if len(scores) < len(votes):
            answer = answers[votes.index(None)]
            raise RewardError(
                f"there is no verdict in the judge's answer {answer[-200:]!r}; mend "
                "judge.template or judge.pattern, raise judge.max_tokens (or judge_model."
                "max_prompt_tokens, beyond which there is no answer), or set judge.unparsed to "
                f"a score; on {row.title}"
            )
        return Scored(fmean(scores), {"unparsed": votes.count(None) / len(votes)})

    def _verdict(self, answer: str) -> float | None:
        matches = self._pattern.findall(answer)
        text = matches[-1].strip() if matches else ""
        if self._verdicts:
            return self._verdicts.get(text.casefold())
        low, high = self._section.range
        try:
            share = (float(text) - low) / (high - low)
        except ValueError:
            return None
        return share if 0 <= share <= 1 else None


def win_rates(
    rows: int, pairs: Sequence[tuple[int, int]], verdicts: Sequence[Scored]
) -> list[Scored]:
    """The share of its comparisons that each of `rows` responses wins; 0.5 of one that has none.

    A verdict on a pair is the first one's score in it, from 0 to 1; the second one has the rest.
    With both orders of each pair a judge's preference for a place cancels out, see
    https://arxiv.org/abs/2306.05685.
    """
    won: list[list[float]] = [[] for _ in range(rows)]
    unparsed: list[list[float]] = [[] for _ in range(rows)]
    for pair, verdict in zip(pairs, verdicts, strict=True):
        for row, score in zip(pair, (verdict.score, 1 - verdict.score), strict=True):
            won[row].append(score)
            unparsed[row].append(verdict.further["unparsed"])
    return [
        Scored(fmean(scores or [0.5]), {"unparsed": fmean(shares or [0.0])})
        for scores, shares in zip(won, unparsed, strict=True)
    ]
