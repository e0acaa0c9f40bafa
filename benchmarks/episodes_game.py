"""The game of `episodes.py`: guess a number with a tool that takes as long as its row says.

Each contender asks for a class of another form; the game is the same. This file is loaded in the
environments of both, so it needs neither of them.
"""

from __future__ import annotations

import time
from typing import Any

TURNS = 8  # guesses that count


class _Game:
    """A secret number."""

    def _begin(self, answer: str, seconds: float) -> None:
        self._secret = int(answer)
        self._seconds = seconds
        self._guesses = 0
        self._found = False

    def guess(self, number: int) -> str:
        """
        Guess the secret number.

        Args:
            number: the guess
        """
        time.sleep(self._seconds)
        self._guesses += 1
        if self._guesses <= TURNS and number == self._secret:
            self._found = True
        if number == self._secret:
            return "right"
        return "higher" if number < self._secret else "lower"

    def _score(self) -> float:
        """1 for the first guess, and less for each further one; 0 if it was not found."""
        return 1 - (self._guesses - 1) / TURNS if self._found else 0.0


class OursGame(_Game):
    """As `rollout.environment` asks for it."""

    def reset(self, row: dict[str, Any]) -> None:
        """Take the secret."""
        self._begin(row["answer"], row["seconds"])

    def reward(self) -> float:
        """What the episode is worth."""
        return self._score()


class TrlGame(_Game):
    """As TRL's `environment_factory` asks for it."""

    def reset(self, answer: str, seconds: float, **_: Any) -> None:
        """Take the secret."""
        self._begin(answer, seconds)

    def get_reward(self) -> float:
        """What the episode is worth."""
        return self._score()
