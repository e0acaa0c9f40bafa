"""Where a stop string ends a response."""

import pytest

from mrlhf.inference.stopping import end_of

PIECES = ["Hel", "lo", " wor", "ld", "!", "\\n", "Hu", "man", ":"]


def decode(token_ids):
    return "".join(PIECES[token] for token in token_ids)


@pytest.mark.parametrize(
    ("tokens", "stop", "end"),
    [
        ([0, 1, 2, 3, 4], ("world",), 4),  # completed by the fourth token
        ([0, 1, 2, 3, 4], ("lo w",), 3),  # in the middle of a token
        ([0, 1, 2, 3, 4], ("!", "Hello"), 2),  # the first of several
        ([5, 6, 7, 8, 0], ("\\nHuman:",), 4),
        ([0], ("Hel",), 1),
        ([0, 1], ("absent",), None),
        ([], ("x",), None),
    ],
)
def test_the_end_is_after_the_token_that_completes_a_stop_string(tokens, stop, end):
    assert end_of(tokens, decode, stop) == end
