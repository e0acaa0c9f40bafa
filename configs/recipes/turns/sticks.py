"""Take the sticks: two players take 1 to 3 sticks in turn, and who takes the last one wins."""

from __future__ import annotations

import random
from typing import Any

MOST = 12
AT_ONCE = 3


async def sticks(engine: Any, row: dict[str, Any], sampling: Any) -> list[Any]:
    """A game that begins with the row's sticks, against the row's opponent if it names one."""
    if row.get("opponent") == "best":
        return await play_the_best(engine, row["sticks"])
    return await play_itself(engine, row["sticks"])


async def play_itself(engine: Any, left: int) -> list[Any]:
    """The policy plays both sides; each move is a trajectory, and earns 1 if its player wins.

    It is compared with the other moves from as many sticks, whoever made them. One that breaks the
    rules loses the game and earns -1, so that it is no way out where the game is lost anyhow.
    """
    moves: list[Any] = []
    taken = 1
    while taken and left:
        moves.append(await ask(engine, left))
        moves[-1].role = f"{left} left"
        taken = taken_by(moves[-1].text, left)
        left -= taken
    is_legal = taken > 0
    for number, move in enumerate(reversed(moves)):
        move.reward = float(is_legal == (number % 2 == 0))
    if not is_legal:
        moves[-1].reward = -1.0
    return moves


async def play_the_best(engine: Any, left: int) -> list[Any]:
    """The policy begins, and the code that answers makes no mistake."""
    moves: list[Any] = []
    won = False
    while left:
        moves.append(await ask(engine, left))
        taken = taken_by(moves[-1].text, left)
        left -= taken
        won = taken > 0 and left == 0
        if not taken:
            break
        left -= best(left) if left else 0
    moves[-1].reward = {"score": float(won), "acc": float(won)}
    return moves


async def ask(engine: Any, left: int) -> Any:
    """A move from so many sticks; the player is told nothing else."""
    return await engine.generate(await engine.prompt(str(left)))


def taken_by(text: str, left: int) -> int:
    """The sticks that a move takes; 0 if it breaks the rules, which loses the game."""
    legal = [str(number) for number in range(1, min(AT_ONCE, left) + 1)]
    return int(text) if text in legal else 0


def best(left: int) -> int:
    """Leave a multiple of four; where that cannot be done, any move is as good."""
    return left % (AT_ONCE + 1) or random.randint(1, AT_ONCE)
