"""Who sends which tokens to whom."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.parallel.token_exchange import route_tokens


def _places(*places: int) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int64)


def test_a_row_on_its_rank_stays_and_copies_take_turns() -> None:
    """Ranks 0 and 1 both hold tokens 4 and 7; rank 1 wants 7, ranks 2 and 3 want both."""
    held = [_places(4, 7), _places(7, 4), _places(), _places()]
    wanted = [_places(), _places(7), _places(7, 4), _places(4, 7)]
    routes = [route_tokens(rank, held, wanted) for rank in range(4)]

    assert [rows.tolist() for rows in routes[1].kept] == [[0], [0]]
    assert {peer: rows.tolist() for peer, rows in routes[0].sends.items()} == {2: [1, 0]}
    assert {peer: rows.tolist() for peer, rows in routes[1].sends.items()} == {3: [1, 0]}
    assert {peer: rows.tolist() for peer, rows in routes[2].receives.items()} == {0: [0, 1]}
    assert {peer: rows.tolist() for peer, rows in routes[3].receives.items()} == {1: [0, 1]}
    assert not routes[0].receives and not routes[3].sends


@given(st.data())
def test_every_wanted_row_comes_once_from_a_rank_that_has_it(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5))
    tokens = data.draw(st.integers(0, 12))
    holders = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(tokens)]
    held = [_places(*(t for t in range(tokens) if rank in holders[t])) for rank in range(ranks)]
    wants = st.lists(st.integers(0, max(0, tokens - 1)), unique=True, max_size=tokens)
    wanted = [_places(*data.draw(wants)) for _ in range(ranks)]
    routes = [route_tokens(rank, held, wanted) for rank in range(ranks)]

    for rank, own in enumerate(routes):
        found = dict(zip(own.kept[1].tolist(), held[rank][own.kept[0]].tolist(), strict=True))
        for peer, rows in own.receives.items():
            sent = held[peer][routes[peer].sends[rank]].tolist()
            assert not found.keys() & set(rows.tolist())
            found |= dict(zip(rows.tolist(), sent, strict=True))
        assert [found[row] for row in range(len(wanted[rank]))] == wanted[rank].tolist()
        assert set(own.sends) == {peer for peer in range(ranks) if rank in routes[peer].receives}
