"""The configuration of DPO: what the reference takes from the policy, and what is refused."""

from __future__ import annotations

import pytest

from mrlhf.config import DPOConfig
from mrlhf.errors import ConfigError
from mrlhf.preflight import check, describe
from mrlhf.preflight.schedule_drawing import draw_schedules
from tests.unit.config_files import SUPERVISED, load_text, message
from tests.unit.configurations import problems, supervised


def test_the_reference_is_the_policy_that_training_starts_from(tmp_path):
    keys = ("model.tp=2", "model.cp=2", "model.pp=2", "model.micro_batch_tokens=4096")
    reference = load_text(tmp_path, SUPERVISED, *keys, "model.vpp=2", root=DPOConfig).reference
    assert reference.path == "models/policy"
    assert (reference.tp, reference.cp, reference.pp, reference.vpp) == (2, 2, 2, 2)
    assert reference.micro_batch_tokens == 4096

    own = ("reference.path=models/other", "reference.pp=1", "reference.micro_batch_tokens=100")
    reference = load_text(
        tmp_path, SUPERVISED, *keys, *own, "model.vpp=2", root=DPOConfig
    ).reference
    assert (reference.path, reference.tp, reference.pp) == ("models/other", 2, 1)
    assert (reference.vpp, reference.micro_batch_tokens) == (1, 100)
    null = load_text(tmp_path, SUPERVISED, "reference.path=null", root=DPOConfig)
    assert null.reference.path == "models/policy"


def test_the_loss_and_its_numbers(tmp_path):
    dpo = load_text(tmp_path, SUPERVISED, root=DPOConfig).dpo
    assert (dpo.loss_type, dpo.beta, dpo.label_smoothing) == ("sigmoid", 0.1, 0.0)
    for wrong in ("dpo.beta=0", "dpo.label_smoothing=0.5", "dpo.loss_type=hinge"):
        said = message(tmp_path, SUPERVISED, wrong, root=DPOConfig)
        assert f"for '{wrong.split('=')[0]}'" in said


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"model__init": "random"},
            "model.init is random, but DPO compares with the policy that it starts from; set it to "
            "checkpoint, and model.path to a trained policy",
        ),
        (
            {"dpo__loss_type": "ipo", "dpo__label_smoothing": 0.1},
            "dpo.label_smoothing 0.1 has no effect, since dpo.loss_type is ipo; leave it at 0.0, "
            "or use sigmoid",
        ),
        (
            {"model__micro_batch_tokens": 255},
            "model.micro_batch_tokens 255 is less than the longest pair of sequences, 2 x "
            "data.max_length 128 = 256 tokens; raise micro_batch_tokens to at least 256 or lower "
            "the length",
        ),
        (
            {"trainer__keep_best": "rm/accuracy"},
            "trainer.keep_best is rm/accuracy, which is no metric of this run; their names begin "
            "with dpo/, perf/, timing_s/, val/",
        ),
        (
            {"model__tp": 3},
            "model: world size 4 is not divisible by tp 3 x pp 1 = 3; ",
        ),
    ],
)
def test_mistakes_are_told_once(changes, line):
    (problem,) = problems(supervised(DPOConfig, **changes), 4)
    assert problem.startswith(line)


def test_a_reference_of_another_layout_is_checked_for_itself():
    check(supervised(DPOConfig, reference__tp=4), 4)
    (problem,) = problems(supervised(DPOConfig, reference__tp=3), 4)
    assert problem.startswith("reference: world size 4 is not divisible by tp 3")
    with pytest.raises(ConfigError, match=r"^reference\.micro_batch_tokens 100 is less"):
        check(supervised(DPOConfig, reference__micro_batch_tokens=100), 4)


def test_describe():
    config = supervised(DPOConfig, dpo__label_smoothing=0.1, model__pp=2, reference__tp=4)
    assert describe(config, 8).splitlines()[:8] == [
        "DPO on 8 ranks",
        "  model        tp 2 x pp 2 x dp 2, 256 tokens a micro-batch",
        "  reference    tp 4 x pp 2 x dp 1, 256 tokens a micro-batch",
        "the method",
        "  loss: sigmoid, beta 0.1, label smoothing 0.1",
        "  the reference is asked once about all pairs, before the first step, and then freed",
        "each optimizer step",
        "  16 pairs of <= 256 tokens, at full length 8 a data-parallel rank and 1 a micro-batch: "
        "8 micro-batches, pipeline bubble 11%",
    ]
    drawn = [line for line in draw_schedules(config, 8) if ": pp" in line]
    assert len(drawn) == 1 and drawn[0].startswith("  model: pp 2, 8 micro-batches forward and")
