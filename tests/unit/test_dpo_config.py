"""The configuration of DPO: what the reference takes from the policy, and what is drawn."""

from __future__ import annotations

from mrlhf.config import DPOConfig
from mrlhf.preflight.schedule_drawing import draw_schedules
from tests.unit.config_files import SUPERVISED, load_text
from tests.unit.configurations import supervised


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


def test_the_schedule_of_what_is_trained_is_drawn():
    config = supervised(DPOConfig, model__pp=2, reference__tp=4)
    drawn = [line for line in draw_schedules(config, 8) if ": pp" in line]
    assert len(drawn) == 1 and drawn[0].startswith("  model: pp 2, 8 micro-batches forward and")
