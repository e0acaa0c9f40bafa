"""The schedule of a pipeline as text."""

from __future__ import annotations

from mrlhf.config import DPOConfig, SFTConfig
from mrlhf.preflight.schedule_drawing import draw, draw_schedules
from tests.unit.configurations import ppo, supervised


def test_1f1b() -> None:
    assert list(draw(2, 1, 4, forward_only=False)) == [
        "stage 0  A1 A2 .  a1 A3 a2 A4 a3 .  a4",
        "stage 1  .  A1 a1 A2 a2 A3 a3 A4 a4 .",
    ]


def test_interleaved() -> None:
    assert list(draw(2, 2, 2, forward_only=False)) == [
        "stage 0  A1 A2 B1 B2 .  b1 .  b2 a1 a2",
        "stage 1  .  A1 A2 B1 b1 B2 b2 a1 a2 .",
    ]


def test_forward_only() -> None:
    assert list(draw(3, 1, 2, forward_only=True)) == [
        "stage 0  A1 A2 .  .",
        "stage 1  .  A1 A2 .",
        "stage 2  .  .  A1 A2",
    ]


def test_what_is_long_is_cut_in_the_middle() -> None:
    lines = list(draw(20, 1, 100, forward_only=False))
    assert len(lines) == 17
    assert all(len(line) <= 98 for line in lines)
    assert lines[0].startswith("stage 0   A1   A2   A3 ") and lines[0].endswith(" a100")
    assert lines[8].strip() == "..." and lines[9].startswith("stage 13  .    .    .")
    # 2 x (100 + 20 - 1) passes, of which 17 columns of 5 characters show 16
    assert lines[-1] == "left out in the middle: 222 of 238 passes and 5 of 20 stages"


def test_each_role_with_a_pipeline_has_its_schedule() -> None:
    config = ppo(
        actor__vpp=2,
        actor__use_kl_loss=True,
        reference__micro_batch_tokens=1600,
        actor__micro_batch_tokens=800,
    )
    lines = list(draw_schedules(config, 8))
    assert [line for line in lines if line.startswith("  ") and ":" in line][1:] == [
        "  actor: pp 2 x vpp 2, 2 micro-batches forward and backward; pipeline bubble 20%",
        "  reference: pp 2 x vpp 2, 4 micro-batches forward only; pipeline bubble 11%",
    ]
    assert lines[-2:] == [
        "    stage 0  A1 A2 B1 B2 A3 A4 B3 B4 .",
        "    stage 1  .  A1 A2 B1 B2 A3 A4 B3 B4",
    ]
    assert list(draw_schedules(ppo(actor__pp=1), 8)) == []


def test_a_supervised_model_is_trained() -> None:
    lines = list(draw_schedules(supervised(SFTConfig, model__pp=2), 4))
    assert lines[2].startswith("  model: pp 2, 8 micro-batches forward and backward; pipeline ")


def test_the_schedule_of_what_is_trained_is_drawn() -> None:
    config = supervised(DPOConfig, model__pp=2, reference__tp=4)
    drawn = [line for line in draw_schedules(config, 8) if ": pp" in line]
    assert len(drawn) == 1 and drawn[0].startswith("  model: pp 2, 8 micro-batches forward and")
