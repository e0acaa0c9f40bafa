"""A rank that fails ends the whole job at once, and its own error is shown."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.programs import torchrun


def test_an_engine_that_raises_on_one_rank_ends_the_job(start_policy: Path, tmp_path: Path) -> None:
    keys = [
        f"actor.path={start_policy}/sft/model",
        f"data.train_files={start_policy}/data/train.jsonl",
        f"data.val_files={start_policy}/data/validation.jsonl",
        "data.test_files=[]",
        "actor.tp=2",
        "actor.pp=1",
        f"trainer.output_dir={tmp_path}",
        "distributed.timeout_s=3600",  # so that ranks that wait for the others exceed the limit
    ]
    program = ["-m", "tests.e2e.one_rank_fails", "--config", "configs/demo_cpu.yaml"]

    done = torchrun(4, [*program, *keys])
    assert done.returncode != 0
    error = "EngineError: no room for 1 prompts; raise rollout.kv_cache_mb"
    assert f"[rank 1] ERROR mrlhf.run.failures: {error}" in done.stderr
    assert done.stderr.count("] ERROR ") == 1
    assert f"traceback : {error}" in done.stderr  # in torchrun's own summary
    assert "a rank went on without the others" not in done.stdout
