"""Boxes of named tensors in ranges of a flat parameter: any cut holds each element once."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.weights.boxes import Box, boxes_in
from mrlhf.weights.shard import Rule, Slot, local_shape, pieces_of

RULES = {
    "qkv": (Rule(("q", "k", "v"), dim=0, periods=4), {"q": (16, 6), "k": (8, 6), "v": (8, 6)}),
    "q, k and v in one tensor": (
        Rule(("f", "f", "f"), dim=0, periods=4, intervals=((0, 16), (16, 24), (24, 32))),
        {"f": (32, 5)},
    ),
    "taps of a convolution": (
        Rule(("c", "c", "c"), dim=0, intervals=((0, 8), (8, 16), (16, 32))),
        {"c": (32, 1, 4)},
    ),
    "gate and up": (Rule(("gate", "up"), dim=0), {"gate": (12, 5), "up": (12, 5)}),
    "row-parallel": (Rule(("o",), dim=1), {"o": (5, 12)}),
    "padded vocabulary": (Rule(("embed",), dim=0), {"embed": (11, 3)}),
    "bias": (Rule(("qb", "kb", "vb"), dim=0, periods=4), {"qb": (16,), "kb": (8,), "vb": (8,)}),
    "norm": (Rule(("norm",), dim=None), {"norm": (7,)}),
}


@given(
    kind=st.sampled_from(sorted(RULES)),
    tp=st.sampled_from([1, 2, 4]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_any_cut_of_any_layout_holds_the_tensors_once(
    kind: str, tp: int, cuts: list[float]
) -> None:
    rule, shapes = RULES[kind]
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape)
    rebuilt = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}

    ranks = range(tp if rule.dim is not None else 1)
    for rank in ranks:
        pieces = pieces_of("p", rule, shapes, rank, tp)
        shape = local_shape(rule, shapes, tp)
        parameter = torch.zeros(shape)
        for piece in pieces:
            Slot(piece, parameter).store(
                tensors[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
            )

        flat = parameter.flatten()
        edges = sorted({0, len(flat), *(int(cut * len(flat)) for cut in cuts)})
        for start, stop in pairwise(edges):
            for piece in pieces:
                for stored in boxes_in(piece, shape, start, stop):
                    assert all(start <= a < b <= stop for a, b in stored.runs)
                    values = torch.cat([flat[a:b] for a, b in stored.runs])
                    index = stored.box.within(
                        Box(piece.name, (0,) * len(shape), shapes[piece.name])
                    )
                    assert rebuilt[piece.name][index].isnan().all(), "an element is held twice"
                    rebuilt[piece.name][index] = values.view(stored.box.shape)

    for name, tensor in tensors.items():
        assert torch.equal(rebuilt[name], tensor)


def test_a_partial_row_has_a_box_of_its_own() -> None:
    (piece,) = pieces_of("p", Rule(("w",), dim=0), {"w": (4, 3)}, 0, 1)
    boxes = boxes_in(piece, (4, 3), 2, 10)
    assert [stored.box.key for stored in boxes] == ["w[0:1,2:3]", "w[1:3,0:3]", "w[3:4,0:1]"]
    assert [stored.runs for stored in boxes] == [((2, 3),), ((3, 9),), ((9, 10),)]


def test_intersection() -> None:
    left = Box("w", (0, 0), (4, 4))
    assert left.intersection(Box("w", (2, 3), (6, 9))) == Box("w", (2, 3), (4, 4))
    assert left.intersection(Box("w", (4, 0), (6, 9))) is None
