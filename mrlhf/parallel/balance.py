"""Shares out sequences in parts of equal cost, and packs them within a budget of tokens.

Everything is a pure function of integers, and takes n log n steps for n sequences. This file knows
neither batches nor ranks, nor the meaning of a cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split_balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `costs` in `parts` parts of nearly equal total cost, none empty, each ascending.

    The costliest first, each to the part with the least so far. There must be at least as many
    costs as parts.
    """
    assert len(costs) >= parts, f"{len(costs)} sequences cannot fill {parts} parts"
    loads = [(0, 0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]

    for index in _descending(costs):
        load, count, part = loads[0]
        shares[part].append(index)
        heapq.heapreplace(loads, (load + costs[index], count + 1, part))
    return [sorted(share) for share in shares]


def pack_rows(lengths: Sequence[int], costs: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths` in few packs of at most `budget` tokens and of nearly equal cost.

    There are as many packs as first-fit-decreasing needs. A sequence longer than the budget has a
    pack of its own. If first-fit-decreasing leaves too little room to even out the costs, its packs
    stay as they are.
    """
    tight = _first_fit(lengths, budget)
    packs = _even_packs(lengths, costs, budget, len(tight)) or tight
    return sorted(sorted(pack) for pack in packs)


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Packs by first-fit-decreasing: the longest first, each into the first pack with room.

    A tree over the packs knows the most room below each node, so a sequence finds its pack in
    log(n) steps. https://en.wikipedia.org/wiki/First-fit_bin_packing has bounds on their number.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)  # the children of node i are 2 i and 2 i + 1
    packs: list[list[int]] = []

    for index in _descending(lengths):
        length = lengths[index]
        if length > budget:
            node = leaves + len(packs)  # longer ones come first, so no pack has room to share
        else:
            node = 1
            while node < leaves:
                node *= 2
                if room[node] < length:
                    node += 1

        if node - leaves == len(packs):
            packs.append([])
        packs[node - leaves].append(index)

        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return packs


def _even_packs(
    lengths: Sequence[int], costs: Sequence[int], budget: int, count: int
) -> list[list[int]] | None:
    """Exactly `count` packs of nearly equal cost, or None if a sequence finds no room.

    The costliest first, each into the cheapest pack; if that has no room, into the emptiest one.
    """
    packs: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    totals = [0] * count
    # A heap may hold old entries of a pack; the true ones are found in `totals` and `tokens`.
    cheapest = [(0, pack) for pack in range(count)]
    emptiest = [(0, pack) for pack in range(count)]

    for index in _descending(costs):
        length = lengths[index]
        while cheapest[0][0] != totals[cheapest[0][1]]:
            heapq.heappop(cheapest)
        while emptiest[0][0] != tokens[emptiest[0][1]]:
            heapq.heappop(emptiest)

        pack = cheapest[0][1]
        if tokens[pack] + length > budget:
            pack = emptiest[0][1]
        if packs[pack] and tokens[pack] + length > budget:
            return None

        packs[pack].append(index)
        tokens[pack] += length
        totals[pack] += costs[index]
        heapq.heappush(cheapest, (totals[pack], pack))
        heapq.heappush(emptiest, (tokens[pack], pack))
    return packs


def _descending(numbers: Sequence[int]) -> list[int]:
    """Indices of `numbers` from the largest to the smallest; equal ones in order."""
    return sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))
