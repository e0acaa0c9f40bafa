"""Alphabet sort: each turn gives more names, and the policy lists all names so far in order."""

from __future__ import annotations

from typing import Any

TURNS = 3


def listed(names: list[str]) -> str:
    """Names as both sides write them: one a line."""
    return "\n".join(names)


class AlphabetSort:
    """Names for each turn, which the row of the data has; the prompt shows those of the first."""

    def reset(self, row: dict[str, Any]) -> None:
        """Take the names."""
        self.turns: list[list[str]] = row["names"]
        self.given = list(self.turns[0])
        self.right: list[bool] = []
        self.earned = 0.0

    def reply(self, text: str) -> str | None:
        """Check an answer, and give the next names."""
        self.right.append(text == listed(sorted(self.given)))
        self.earned = self.right[-1] / TURNS
        if len(self.right) == TURNS:
            return None
        more = self.turns[len(self.right)]
        self.given += more
        return listed(more)

    def turn_reward(self) -> float:
        """A third for a right answer, so that all right answers earn 1; nothing for other turns."""
        earned = self.earned
        self.earned = 0.0
        return earned

    def reward(self) -> dict[str, float]:
        """Whether all answers were right; turns have been paid for already."""
        right = sum(self.right)
        return {"score": 0.0, "acc": float(right == TURNS), "right_turns": float(right)}
