"""Guess the number: the policy calls the tool `guess` until it is right."""

from __future__ import annotations

from typing import Any

MOST = 32
TURNS = 8


class GuessTheNumber:
    """A secret number, which the row of the data has."""

    def reset(self, row: dict[str, Any]) -> None:
        """Take the secret."""
        self.secret = int(row["answer"])
        self.turns = 0
        self.done = False

    def guess(self, number: int) -> str:
        """Guess the secret number."""
        self.turns += 1
        self.done = number == self.secret
        if self.done:
            return "right"
        return "higher" if number < self.secret else "lower"

    def reward(self) -> dict[str, float]:
        """1 for the first turn, and less for each further one; 0 if it was not found."""
        score = 1 - (self.turns - 1) / TURNS if self.done else 0.0
        return {"score": score, "acc": float(self.done), "guesses": float(self.turns)}
