"""What the generation benchmark counts for its limits, by hand."""

from types import SimpleNamespace

import pytest

from tests.e2e.programs import ROOT


@pytest.fixture
def work(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from generation_limits import work

    return work


def test_operations_and_bytes_of_a_generation(work):
    config = SimpleNamespace(
        hidden_size=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=3,
        intermediate_size=8,
        num_hidden_layers=3,
        vocab_size=10,
    )
    layer = 4 * 6 + 6 * 4 + 2 * (4 * 3) + 3 * (4 * 8)  # q, o, k and v, MLP
    operations, read = work(config, 2, [2, 1], itemsize=4)

    # Two prompt tokens each, and the first token of the first response: 5 tokens; 3 draws. They see
    # 1, 2, 3 and 1, 2 tokens; scores and values are two products of width 6 in each of 3 layers.
    assert operations == 2 * 3 * layer * 5 + 2 * 40 * 3 + 3 * (2 * 2 * 6) * 9

    # Two steps read all weights; the one decoded token reads keys and values of 3 tokens, width 3,
    # in 3 layers.
    assert read == 2 * (3 * layer + 40) * 4 + 3 * 2 * 3 * 3 * 4


def test_of_a_mixture_few_experts_are_computed_and_all_are_read(work):
    config = SimpleNamespace(
        hidden_size=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=3,
        num_hidden_layers=1,
        vocab_size=10,
    )
    attention = 4 * 4 + 4 * 4 + 2 * (4 * 2)

    # One prompt token, one drawn token, none decoded: attention sees one pair of width 4.
    operations, read = work(config, 1, [1], itemsize=4)
    assert operations == 2 * (attention + 3 * 4 * 2 * 3) + 2 * 40 + 2 * 2 * 4
    assert read == (attention + 3 * 4 * 5 * 3 + 40) * 4
