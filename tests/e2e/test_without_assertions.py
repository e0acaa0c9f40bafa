"""`python -O` leaves out all assertions: a run trains, exports and loads all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrlhf.commands import convert_checkpoint
from tests.e2e.programs import succeed, torchrun
from tests.models.checkpoints import assert_same_tensors


def test_a_run_without_assertions(
    demo_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    places = [
        f"data.train_files={demo_data}/sft.jsonl",
        f"data.tokenizer={demo_data}/tokenizer",
        f"trainer.output_dir={tmp_path}/run",
    ]
    keys = ["trainer.total_steps=3", "trainer.save_freq=2", "optim.lr_warmup_steps=1"]
    train = ["launch/train_sft.py", "--config", "configs/demo_sft_cpu.yaml", *places, *keys]
    said = succeed(torchrun(1, train))
    saved = tmp_path / "run" / "checkpoints" / "step_000003"
    assert f"saved the checkpoint {saved} in " in said and "; the disk has room for " in said

    exported = tmp_path / "run" / "model"
    model = AutoModelForCausalLM.from_pretrained(exported)
    ids = AutoTokenizer.from_pretrained(exported)("1+1=", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()

    capsys.readouterr()
    for out, step, source in (("end", [], exported), ("three", ["--step", "3"], saved)):
        target = ["--to", "huggingface", "--out", str(tmp_path / out), "--verify"]
        assert convert_checkpoint.main([str(tmp_path / "run"), *target, *step]) == 0
        told = capsys.readouterr().out
        assert told.startswith(f"{source}: ") and ", of step 3\n" in told
        assert_same_tensors(exported, tmp_path / out)
