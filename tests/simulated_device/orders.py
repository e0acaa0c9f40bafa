"""Compares the order of collectives on all ranks, which NCCL needs to be the same.

Ranks that share groups must enter the collectives of these groups in one order, with the same
operator, dtype and number of elements; messages from one rank to another must be received in the
order in which they were sent. It does not know torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple


class Collective(NamedTuple):
    """One call of a collective on one rank.

    Attributes:
        where: "device" or "host".
        operator: as torch names it.
        group: name of the process group, which is the same on all of its ranks.
        ranks: of the group, in the whole job.
        what: dtype and numbers of elements, as far as all ranks of the group must agree on them.
        peer: the other rank of a message; -1 for all.
        line: of the code.
        nbytes: of the tensors.
    """

    where: str
    operator: str
    group: str
    ranks: tuple[int, ...]
    what: str
    peer: int
    line: str
    nbytes: int


def problems(by_rank: Sequence[Sequence[Collective]]) -> list[str]:
    """Where two ranks differ in the collectives of the device; the first place for each pair."""
    found = []
    for first, second in combinations(range(len(by_rank)), 2):
        found += _shared(first, by_rank[first], second, by_rank[second])
    for sender in range(len(by_rank)):
        for receiver in range(len(by_rank)):
            found += _messages(sender, by_rank[sender], receiver, by_rank[receiver])
    return found


def _shared(
    first: int, ours: Sequence[Collective], second: int, theirs: Sequence[Collective]
) -> list[str]:
    """The collectives of groups that hold both ranks."""
    sequences = [
        [row for row in rows if _is_of_all(row) and {first, second} <= set(row.ranks)]
        for rows in (ours, theirs)
    ]
    for number, (a, b) in enumerate(zip(*sequences, strict=False)):
        if (a.operator, a.group, a.what) != (b.operator, b.group, b.what):
            return [f"collective {number} of ranks {first} and {second}: {_say(a)}; {_say(b)}"]
    if len(sequences[0]) != len(sequences[1]):
        return [
            f"ranks {first} and {second} enter {len(sequences[0])} and {len(sequences[1])} shared "
            "collectives"
        ]
    return []


def _messages(
    sender: int, sent: Sequence[Collective], receiver: int, received: Sequence[Collective]
) -> list[str]:
    out = [row for row in sent if _is(row, "send") and row.peer == receiver]
    into = [row for row in received if _is(row, "recv_") and row.peer == sender]
    for number, (a, b) in enumerate(zip(out, into, strict=False)):
        if (a.group, a.what) != (b.group, b.what):
            return [f"message {number} from {sender} to {receiver}: {_say(a)}; {_say(b)}"]
    if len(out) != len(into):
        return [f"{sender} sends {receiver} {len(out)} messages, and {len(into)} are received"]
    return []


def _is_of_all(row: Collective) -> bool:
    return row.where == "device" and row.peer < 0


def _is(row: Collective, operator: str) -> bool:
    return row.where == "device" and row.operator == operator


def _say(row: Collective) -> str:
    return f"{row.operator} of {row.what} in {row.group} at {row.line}"
