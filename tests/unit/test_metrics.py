"""Tallies merged in any way, and metrics of a literal batch."""

import math
from dataclasses import replace

import pytest
import torch

from mrlhf.batch import NO_VERSION, Episode, Experience, Prompts
from mrlhf.metrics import (
    Tally,
    data_metrics,
    explained_variance,
    throughput_metrics,
    value_metrics,
)
from mrlhf.metrics.step import quarters
from tests.metric_rows import without_row
from tests.rollouts import make_rollout


def test_means_are_weighted_by_counts_and_do_not_depend_on_the_split():
    whole = Tally()
    first = Tally()
    second = Tally()
    for tally, total, count in ((first, 6.0, 3), (first, 1.0, 1), (second, 8.0, 4)):
        for target in (tally, whole):
            target.add("actor/pg_loss", total, count)
    assert first.values() == {"actor/pg_loss": 7 / 4}
    first.merge(second)
    assert first.values() == whole.values() == {"actor/pg_loss": 15 / 8}
    assert second.values() == {"actor/pg_loss": 2.0}


def test_tensors_are_taken_without_their_graph_and_without_losing_counts():
    tally = Tally()
    weight = torch.tensor(3.0, requires_grad=True)
    tally.add("loss", 2 * weight, torch.tensor(4))
    for _ in range(2):
        tally.add("tokens", torch.tensor(2.0**24, dtype=torch.float32), 1)
        tally.add("tokens", torch.tensor(1.0, dtype=torch.float32), 0)
    assert tally.values() == {"loss": 1.5, "tokens": 2.0**24 + 1}
    assert not tally.to_vector(["loss", "tokens"]).requires_grad


def test_nothing_counted_has_no_mean():
    tally = Tally()
    tally.add("empty", torch.tensor(0.0), 0)
    assert math.isnan(tally.values()["empty"])


def test_what_is_not_finite_can_be_left_out():
    tally = Tally()
    for name, total in (
        ("loss", torch.tensor(float("nan"))),
        ("kl", float("inf")),
        ("clipped", 3.0),
    ):
        tally.add(name, total, 4)
    assert tally.finite().values() == {"clipped": 0.75}


def test_summed_vectors_of_ranks_that_met_different_names_are_the_merged_tally():
    names = ["a", "b", "c"]
    ranks = [Tally(), Tally(), Tally()]
    ranks[0].add("a", 1.0, 2)
    ranks[1].add("b", 5.0, 1)
    ranks[1].add("a", 3.0, 2)
    total = torch.stack([rank.to_vector(names) for rank in ranks]).sum(0)
    assert total.tolist() == [4.0, 5.0, 0.0, 4.0, 1.0, 0.0, 2.0, 1.0, 0.0]
    assert Tally.from_vector(names, total).values() == {"a": 1.0, "b": 5.0}


def test_a_sum_without_a_count_is_reported_itself():
    tally = Tally()
    for taken in (True, False, True):
        tally.add("steps", taken)
        tally.add("norm", 3.0 * taken, taken)
    again = Tally.from_state(tally.state_dict())
    again.merge(tally)
    assert again.values() == {"steps": 4, "norm": 3.0}
    assert again.finite().state_dict() == {"steps": [4.0], "norm": [12.0, 4.0]}


def test_a_name_that_the_vector_lacks_is_refused():
    tally = Tally()
    tally.add("forgotten", 1.0, 1)
    with pytest.raises(AssertionError, match="forgotten"):
        tally.to_vector(["a"])


def _experience():
    """Two responses of 3 and 1 tokens; the padding holds rubbish, which must not be seen."""
    rubbish = 1e9

    prompts = Prompts([[5, 6], [7, 8, 9]], [0, 1], ["a", "b"], ["x", "x"], ["1", "2"], [{}, {}])
    rollout = make_rollout(
        prompts=prompts,
        sample_index=[0, 0],
        response_ids=torch.tensor([[3, 4, 2], [3, 0, 0]]),
        response_mask=torch.tensor([[True, True, True], [True, False, False]]),
        rollout_logprobs=torch.tensor([[0.5, 0.25, 0.5], [0.125, 1.0, 1.0]]).log(),
        stopped=torch.tensor([True, False]),
        version=1,
    )

    return Experience(
        rollout=rollout,
        scores=torch.tensor([1.0, 0.0]),
        loss_mask=torch.tensor([[True, True, True], [True, False, False]]),
        old_logprobs=torch.tensor([[0.5, 0.5, 0.25], [0.625, rubbish, rubbish]]).log(),
        ref_logprobs=None,
        token_rewards=torch.tensor([[-0.25, -0.25, 1.0], [-0.5, 0.0, 0.0]]),
        values=torch.tensor([[1.0, 2.0, 3.0], [0.0, rubbish, rubbish]]),
        advantages=torch.tensor([[-1.0, 0.0, 2.0], [3.0, rubbish, rubbish]]),
        returns=torch.tensor([[1.0, 3.0, 5.0], [-1.0, rubbish, rubbish]]),
    )


def test_data_metrics_of_a_literal_batch():
    expected = {
        "critic/score": (0.5, 1.0, 0.0),
        "critic/rewards": (0.0, 0.5, -0.5),
        "critic/advantages": (1.0, 3.0, -1.0),
        "critic/returns": (2.0, 5.0, -1.0),
        "critic/values": (1.5, 3.0, 0.0),
        "response_length": (2.0, 3.0, 1.0),
        "prompt_length": (2.5, 3.0, 2.0),
    }
    flat = {
        f"{name}/{kind}": number
        for name, numbers in expected.items()
        for kind, number in zip(("mean", "max", "min"), numbers, strict=True)
    }
    flat |= {"response_length/clip_ratio": 0.5, "prompt_length/clip_ratio": 0.5}
    for kind in ("mean", "max", "min", "clip_ratio"):
        flat[f"response_length_non_aborted/{kind}"] = flat[f"response_length/{kind}"]
    flat["response/aborted_ratio"] = 0.0
    # returns - values: 0, 1, 2, -1 with variance 5/3; returns: 1, 3, 5, -1 with variance 20/3
    flat |= {"critic/vf_explained_var": 1 - (5 / 3) / (20 / 3 + 1e-5)}
    # The first quarter has the first token of each response, the next two have one token.
    flat |= {"critic/vf_explained_var/quarter_1": 1 - 0.5 / (2 + 1e-5)}
    flat |= {f"critic/vf_bias/quarter_{n}": bias for n, bias in ((1, 0.5), (2, -1.0), (3, -2.0))}

    metrics = data_metrics(_experience(), max_prompt_length=3)
    assert metrics.keys() == flat.keys() and without_row(metrics) == []
    for name, number in flat.items():
        assert metrics[name] == pytest.approx(number, abs=1e-7), name
        assert type(metrics[name]) is float, name


def test_without_a_critic_there_are_no_metrics_of_values():
    whole = data_metrics(_experience(), max_prompt_length=3)
    metrics = data_metrics(replace(_experience(), values=None), max_prompt_length=3)
    kinds = ("critic/values/", "critic/vf_explained_var", "critic/vf_bias/")
    names = whole.keys() - metrics.keys()
    assert names == {name for name in whole if name.startswith(kinds)} and len(names) == 8


def test_a_rejected_token_is_in_no_metric_of_tokens():
    kept = torch.tensor([[True, True, False], [True, False, False]])
    metrics = data_metrics(replace(_experience(), loss_mask=kept), max_prompt_length=3)
    assert metrics["critic/advantages/mean"] == pytest.approx(2 / 3)
    assert metrics["critic/values/max"] == 2.0
    assert metrics["response_length/mean"] == 2.0


@pytest.mark.parametrize("all_empty", [False, True])
def test_a_response_without_a_token_counts_as_aborted(all_empty):
    whole = _experience()
    rollout = whole.rollout
    empty = torch.tensor([[all_empty] * 3, [True] * 3])
    cut = replace(
        rollout,
        response_mask=rollout.response_mask & ~empty,
        loss_mask=rollout.loss_mask & ~empty,
        rollout_logprobs=rollout.rollout_logprobs.masked_fill(empty, 0),
        versions=rollout.versions.masked_fill(empty, NO_VERSION),
    )

    metrics = data_metrics(
        replace(whole, rollout=cut, loss_mask=whole.loss_mask & ~empty), max_prompt_length=3
    )

    names = ("mean", "max", "min", "clip_ratio")
    found = [metrics[f"response_length_non_aborted/{name}"] for name in names]
    if all_empty:
        assert all(math.isnan(number) for number in found)
        assert metrics["response/aborted_ratio"] == 1.0
    else:
        assert found == [3.0, 3.0, 3.0, float(not rollout.stopped[0])]
        assert metrics["response/aborted_ratio"] == 0.5
        assert metrics["response_length/mean"] == 1.5


def test_explained_variance_of_a_perfect_and_of_a_constant_critic():
    returns = torch.tensor([[1.0, 2.0, 3.0, float("nan")]])
    mask = torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 2.0), returns, mask) == pytest.approx(
        0, abs=2e-5
    )


def test_values_by_quarter_and_by_turn():
    """Two responses; of the first the third token is a tool's, and it has three turns."""
    values = torch.tensor([[1.0, 2.0, 99.0, 3.0, 4.0, 0.5], [1.0, 1.0, 3.0, 5.0, 5.0, 0.0]])
    returns = torch.tensor([[2.0, 2.0, -99.0, 4.0, 4.0, 2.5], [0.0, 1.0, 2.0, 4.0, 7.0, 99.0]])
    mask = torch.tensor([[True, True, False, True, True, True], [True] * 5 + [False]])
    # By hand: five tokens a row that count, of which quarters hold the first two, the third, ...
    assert quarters(mask)[mask].tolist() == [1, 1, 2, 3, 4, 1, 1, 2, 3, 4]
    episode = Episode(turn_begins=[0, 3, 4, 4, 5], turns=[2, 4, 4, 5, 6])
    found = value_metrics("v/", values, returns, mask, [episode, Episode()])

    # Of value - return in the first quarter, -1, 0, 1 and 0, the mean is 0 and the variance 2 / 3;
    # of the returns 2, 2, 0 and 1 it is 11 / 12.
    assert found["v/bias/quarter_1"] == 0.0
    assert found["v/explained_var/quarter_1"] == pytest.approx(1 - (2 / 3) / (11 / 12), abs=2e-5)
    assert found["v/bias/quarter_2"] == 0.0 and found["v/bias/quarter_3"] == 0.5
    assert found["v/bias/quarter_4"] == -2.0 and found["v/explained_var/quarter_4"] == 1.0
    # The second response is one turn. The first one has two tokens of turn 1, one of turn 2, none
    # of turn 3, and those of turns 4 and 5.
    assert found["v/bias/turn_1"] == pytest.approx((-1 + 0 + 1 + 0 + 1 + 1 - 2) / 7)
    assert found["v/bias/turn_2"] == -1.0 and found["v/bias/turn_4"] == -1.0
    # Where the returns are equal, or there is one, nothing can be explained.
    assert "v/bias/turn_3" not in found and len(found) == 1 + 2 * (4 + 3) - 2
    assert not {"v/explained_var/quarter_3", "v/explained_var/turn_2"} & found.keys()
    assert found["v/explained_var"] == explained_variance(values, returns, mask)


def test_an_empty_mask_has_no_share_of_variance():
    assert math.isnan(
        explained_variance(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    )


def test_throughput_counts_responses_for_generation_and_everything_elsewhere():
    metrics = throughput_metrics(
        {"gen": 2.0, "step": 10.0}, 300, 100, generated_tokens=200, world_size=4
    )
    assert metrics == {
        "timing_per_token_ms/gen": 10.0,
        "timing_per_token_ms/step": 25.0,
        "perf/total_num_tokens": 400,
        "perf/time_per_step": 10.0,
        "perf/throughput": 10.0,
    }
