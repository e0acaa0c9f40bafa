"""The message to a judge, and the score in its answers.

It does not know who answers: a server (`chat_judge`) or a model on the ranks (`rollout/judging`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mrlhf.config.reward import JudgeSection
from mrlhf.errors import ConfigError, RewardError
from mrlhf.rewards.interface import RewardInput, Scored

_VARIABLES = ("prompt", "response", "ground_truth", "data_source", "extra_info")


class Judge:
    """Writes messages by the template, and reads verdicts by the pattern."""

    def __init__(self, section: JudgeSection) -> None:
        """Compile both; ConfigError if one is malformed, or the pattern can match no verdict."""
        self._section = section
        self._verdicts = {word.casefold(): score for word, score in section.verdicts.items()}
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        try:
            names = meta.find_undeclared_variables(environment.parse(section.template))
            self._template = environment.from_string(section.template)
        except TemplateError as error:
            raise ConfigError(f"judge.template is no jinja2 template: {error}") from None
        if "response" not in names or not names.issubset(_VARIABLES):
            raise ConfigError(
                f"judge.template names {', '.join(sorted(names)) or 'nothing'}; it should name "
                f"response, and may name {', '.join(_VARIABLES)}"
            )

        low, high = section.range
        numbers = [low + (high - low) * part / 100 for part in range(101)]
        forms = [f"{number:.{digits}f}" for number in numbers for digits in range(3)]
        group = _group_of(section.pattern)
        matched = filter(group.fullmatch, self._verdicts or forms) if group is not None else ()
        if all(self._score(text) is None for text in matched):
            wanted = ", ".join(self._verdicts) or f"a number of judge.range {low:g} to {high:g}"
            raise ConfigError(
                f"judge.pattern {section.pattern!r} should be a regular expression with one group, "
                f"as (...) and not (?:...), that matches {wanted}"
            )
        self._pattern = re.compile(section.pattern)

    def message(self, row: RewardInput) -> str:
        """The message about a response; RewardError if the template fails on it."""
        values = (row.prompt_text, row.solution_str, row.ground_truth, row.data_source)
        named = dict(zip(_VARIABLES, (*values, row.extra_info), strict=True))
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
                "judge.template or judge.pattern, raise judge.max_tokens, or set judge.unparsed to "
                f"a score; on {row.title}"
            )
        return Scored(fmean(scores), {"unparsed": votes.count(None) / len(votes)})

    def _verdict(self, answer: str) -> float | None:
        matches = self._pattern.findall(answer)
        return self._score(matches[-1].strip()) if matches else None

    def _score(self, text: str) -> float | None:
        if self._verdicts:
            return self._verdicts.get(text.casefold())
        low, high = self._section.range
        try:
            share = (float(text) - low) / (high - low)
        except (ValueError, ZeroDivisionError):
            return None
        return share if 0 <= share <= 1 else None


def _group_of(pattern: str) -> re.Pattern[str] | None:
    """The only group of a pattern, which is its shortest part with one; None if it has not one."""
    lengths = range(1, len(pattern) + 1)
    for part in (pattern[begin : begin + n] for n in lengths for begin in range(len(pattern))):
        with suppress(re.error):
            if re.compile(part).groups == 1 == re.compile(pattern).groups:
                return re.compile(part, re.IGNORECASE)
    return None
