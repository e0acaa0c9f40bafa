"""The pure parts of the benchmark of a training step, and a smoke run of it."""

from __future__ import annotations

import json
import os
import sys

import pytest
from transformers import LlamaConfig

from mrlhf.models.families import FAMILIES
from tests.e2e.programs import ROOT, run_program, succeed


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_equal_lengths():
    from train_step_case import lengths_of

    assert lengths_of("equal", 4, 32, seed=1) == [32, 32, 32, 32]


def test_spread_lengths_have_the_same_sum_and_reach_four_times_the_shortest():
    from train_step_case import lengths_of

    lengths = lengths_of("spread", 64, 64, seed=1)
    assert sum(lengths) == 64 * 64
    assert (min(lengths), max(lengths)) == (30, 117)
    assert lengths != sorted(lengths)
    # log-uniform: as many below the geometric mean, 59, as above
    assert sum(length <= 59 for length in lengths) == 32
    assert sorted(lengths_of("spread", 4, 10, seed=9)) == [5, 8, 11, 16]


def test_a_case_counts_its_tokens():
    from train_step_case import EOS, PAD, make_case

    case = make_case("tiny", "float32", "spread", 8)
    assert case.tokens == 8 * 96
    assert case.mini_batch == 4
    first = case.sequences[0]
    assert first == (len(case.prompts[0]) + case.response_lengths[0], case.response_lengths[0])
    assert not {PAD, EOS} & {token for prompt in case.prompts for token in prompt}
    assert make_case("tiny", "float32", "spread", 8) == case


VOCAB = 4096


@pytest.mark.parametrize(
    ("name", "shapes", "around", "category"),
    [
        ("aten::mm", [[3072, 192], [192, 512]], [], "products"),
        ("aten::mm", [[2048, 192], [192, VOCAB]], [], "output layer"),
        ("aten::mm", [[VOCAB, 2048], [2048, 192]], ["MmBackward0"], "output layer"),
        ("aten::logsumexp", [[2048, VOCAB], []], [], "log-probs"),
        ("aten::_softmax", [[8, 96, 96]], [], "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[1, 8, 96, 24]], [], "attention"),
        ("PackedAttention", [], [], "attention"),
        ("RmsNormBackward", [], [], "norms, activations, rotation"),
        ("LinearWithGradAccumulation", [], [], "host"),
        ("aten::silu", [[3072, 512]], [], "norms, activations, rotation"),
        ("aten::mul", [[3072, 192], [3072, 192]], [], "norms, activations, rotation"),
        ("aten::copy_", [[3072, 192]], [], "memory and copies"),
        ("aten::embedding", [[VOCAB, 192], [3072]], [], "memory and copies"),
        ("aten::add_", [[192, 512]], ["torch::autograd::AccumulateGrad"], "gradients"),
        ("aten::zero_", [[100]], ["benchmark: gradients"], "gradients"),
        ("aten::mul_", [[VOCAB, 192]], ["benchmark: optimizer"], "optimizer"),
        ("c10d::allreduce_", [], ["benchmark: optimizer"], "waiting"),
    ],
)
def test_the_category_of_an_operator(name, shapes, around, category):
    from train_step_profile import category as category_of

    assert category_of(name, shapes, around, VOCAB) == category


def test_needed_operations_count_the_output_layer_at_responses_only():
    from train_step_case import Case
    from train_step_rows import needed_operations

    config = LlamaConfig(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    ).to_dict()
    spec = FAMILIES["llama"].read_config(config, "lm")
    critic = FAMILIES["llama"].read_config(config, "scalar")

    # A prompt of 2 tokens and a response of 1. q, o, k, v and the MLP have 144 weights; 3 tokens
    # see 1, 2 and 3 tokens, with two products of width 4.
    body = 2 * 3 * (4 * 4 + 4 * 4 + 2 * (4 * 2) + 3 * (4 * 8)) * 3 + 4 * 3 * 4 * 6
    needed = needed_operations(Case("any", "float32", "equal", [[3, 4]], [1]), spec, critic)
    update = 2 * 3 * (body + 2 * 4 * 10 + body + 2 * 4)
    assert needed["update"] == update
    assert needed["step"] == update + 2 * (body + 2 * 4 * 10) + 2 * (body + 2 * 4)


def test_a_row_and_its_table():
    from train_step_rows import limit_of, summary, table

    # Two rounds, two ranks, two products: the ranks work at once, and the fastest product counts.
    limit = limit_of([[[10.0, 20.0], [10.0, 25.0]], [[12.0, 20.0], [12.0, 20.0]]], 0.5)
    assert limit == 22.5
    figures = summary([3.0, 2.0, 4.0], tokens=6144, operations=27.0, limit=limit)
    assert figures == {"seconds": 3.0, "tokens_per_s": 2048.0, "share_of_gemm_limit": 0.4}

    ours = {
        "run": "a",
        "size": "3M",
        "dtype": "float32",
        "lengths": "equal",
        "case": "step",
        "contender": "ours",
        "layout": "DP2",
        "ranks": 2,
        "threads": 1,
        **figures,
    }
    trl = {**ours, "contender": "trl", "seconds": 4.5}
    other_run = {**trl, "run": "b", "seconds": 90.0}
    assert table([other_run, ours, trl])[3] == (
        "| 3M | float32 | equal | step | ours | DP2 | 2 x 1 | 3.00 | 2,048 | 40% |  | 1.50 |"
    )


def test_a_profile_is_shown_in_percent():
    from train_step_profile import CATEGORIES, profile_table

    profile = {**dict.fromkeys(CATEGORIES, 0.0), "products": 1.5, "host": 0.5, "total": 2.0}
    lines = profile_table([{"title": "a", "profile": profile}])
    assert lines[2] == "| a | 75% |" + " 0% |" * 8 + " 25% |"


SAYS_ITS_CORES = f"""#!{sys.executable}
import json, os, sys, threading

def answer():
    print(json.dumps(sorted(os.sched_getaffinity(0))), flush=True)

answer()
for line in sys.stdin:
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
"""


def test_the_ranks_of_a_team_share_its_cores(tmp_path):
    from teams import Start, Team

    program = tmp_path / "python"
    program.write_text(SAYS_ITS_CORES)
    program.chmod(0o755)
    own = os.sched_getaffinity(0)

    team = Team(Start("two ranks", [str(program)], ranks=2, threads=1, cores=1, python_path=""))
    try:
        team.wait_until_ready()
        assert team.ask("cores") == [[min(own)], [min(own)]]
    finally:
        team.end()
    assert os.sched_getaffinity(0) == own


def test_a_quick_run(tmp_path):
    file = tmp_path / "rows.json"
    command = ["benchmarks/train_step.py", "--quick", "--profile", "--json", str(file)]
    output = succeed(run_program(command))

    rows = json.loads(file.read_text())
    named = [(row["contender"], row["case"]) for row in rows]
    assert named == [("ours", "update"), ("ours", "step"), ("plain", "update")]
    for row in rows:
        assert (row["size"], row["dtype"], row["lengths"]) == ("tiny", "float32", "spread")
        assert (row["ranks"], row["threads"], row["layout"]) == (1, 1, "single")
        assert row["tokens_per_s"] == pytest.approx(768 / row["seconds"])
        assert row["share_of_gemm_limit"] > 0
    profile = rows[0]["profile"]
    parts = sum(seconds for name, seconds in profile.items() if name != "total")
    assert parts == pytest.approx(profile["total"], rel=0.05)
    assert profile["products"] > 0 and profile["optimizer"] > 0
    assert "| tiny | float32 | spread | step | ours | single | 1 x 1 |" in output
