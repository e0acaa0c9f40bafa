"""Take the sticks: two players take 1 to 3 sticks in turn, and who takes the last one wins."""

from __future__ import annotations

import itertools
import random
from typing import Any

MOST = 12
AT_ONCE = 3
ROLES = ("first", "second")


async def sticks(engine: Any, row: dict[str, Any], sampling: Any) -> Any:
    """A game that begins with the row's sticks, against the row's opponent if it names one."""
    if row.get("opponent") == "best":
        return await play_the_best(engine, row["sticks"])
    return await play_itself(engine, row["sticks"])


async def play_itself(engine: Any, left: int) -> list[Any]:
    """The policy plays both sides; each is a trajectory with a reward of its own."""
    players: dict[str, Any] = {}
    for role, other in itertools.cycle((ROLES, ROLES[::-1])):
        players[role] = await ask(engine, players.get(role), left)
        taken = taken_by(players[role].text, left)
        left -= taken
        if not taken or not left:
            winner = role if taken else other
            break

    for role, player in players.items():
        player.role = role
        player.reward = float(role == winner)
    return list(players.values())


async def play_the_best(engine: Any, left: int) -> Any:
    """The policy begins, and the code that answers makes no mistake."""
    player = None
    won = False
    while left:
        player = await ask(engine, player, left)
        taken = taken_by(player.text, left)
        left -= taken
        won = taken > 0 and left == 0
        if not taken:
            break
        left -= best(left) if left else 0

    player.reward = {"score": float(won), "acc": float(won)}
    return player


async def ask(engine: Any, player: Any, left: int) -> Any:
    """The player after its next move; it is told the sticks that are left, and nothing else."""
    told = engine.prompt(str(left)) if player is None else engine.tell(player, str(left))
    return await engine.generate(await told)


def taken_by(text: str, left: int) -> int:
    """The sticks that a move takes; 0 if it breaks the rules, which loses the game."""
    legal = [str(number) for number in range(1, min(AT_ONCE, left) + 1)]
    return int(text) if text in legal else 0


def best(left: int) -> int:
    """Leave a multiple of four; where that cannot be done, any move is as good."""
    return left % (AT_ONCE + 1) or random.randint(1, AT_ONCE)
