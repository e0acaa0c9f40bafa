"""Each preset as shipped, over the arithmetic task and through the launcher: it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.programs import ROOT, succeed, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# The arguments that fit a preset to this task: those of the comment in its file, and a batch of a
# few hundred samples.
FITTED: dict[str, list[str]] = {
    "ppo": ["rollout.n=8"],
    "grpo": ["rollout.n=8"],
    "dr_grpo": [],
    "rloo": [],
    "reinforce_plus_plus": [],
    "remax": ["rollout.n=4"],
    "dapo": ["rollout.n=8", "algorithm.overlong_buffer.len=2"],
    "gspo": ["rollout.n=8"],
    "cispo": ["rollout.n=8"],
    "vapo": ["rollout.n=8", "trainer.critic_warmup=5", "algorithm.lam_length_alpha=1.0"],
}
EXTRA: dict[str, list[str]] = {"ppo": ["trainer.val_n=4", "trainer.peak_tflops=0.05"]}
CRITICS = ("ppo", "vapo")
SPREAD = ("mean", "max", "min")
PHASES = (
    "gen",
    "reshard",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "step",
)
# Every name of the reference that a PPO run with a KL in the reward can measure.
PPO_METRICS = {
    *(
        f"critic/{name}/{kind}"
        for name in ("score", "rewards", "advantages", "returns", "values")
        for kind in SPREAD
    ),
    *(
        f"{name}/{kind}"
        for name in ("response_length", "prompt_length")
        for kind in (*SPREAD, "clip_ratio")
    ),
    *(f"timing_s/{phase}" for phase in PHASES),
    *(f"timing_per_token_ms/{phase}" for phase in PHASES),
    *(
        f"actor/{name}"
        for name in (
            "pg_loss",
            "pg_clipfrac",
            "pg_clipfrac_lower",
            "ppo_kl",
            "approx_kl",
            "entropy",
        )
    ),
    *("actor/grad_norm", "actor/lr", "actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"),
    *(
        f"critic/{name}"
        for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "vf_explained_var")
    ),
    *(
        f"rollout_corr/{name}"
        for name in ("kl", "k3_kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "ppl_ratio")
    ),
    *("rollout_corr/chi2_token", "rollout_corr/chi2_seq"),
    *(f"training/rollout_probs_diff_{kind}" for kind in ("mean", "max", "std")),
    *(
        "perf/total_num_tokens",
        "perf/time_per_step",
        "perf/throughput",
        "perf/max_memory_allocated_gb",
    ),
    *("perf/mfu/actor", "perf/mfu/critic", "training/global_step", "training/epoch"),
}


@pytest.fixture(scope="module", params=FITTED)
def run(request: pytest.FixtureRequest, start_policy: Path) -> tuple[str, list[dict[str, Any]]]:
    """The preset's name, and its metrics of each step."""
    name = request.param
    out = start_policy / name
    configs = [
        "--config",
        "configs/arithmetic_cpu.yaml",
        "--config",
        f"configs/algorithms/{name}.yaml",
    ]
    data = start_policy / "data"
    places = [f"actor.path={start_policy}/sft/model", f"data.train_files={data}/train.jsonl"]
    places += [
        f"data.val_files={data}/held_out.jsonl",
        f"trainer.output_dir={out}",
        "trainer.val_sampled=true",
    ]

    arguments = [*configs, *places, *FITTED[name], *EXTRA.get(name, [])]
    succeed(torchrun(2, ["launch/train_ppo.py", *arguments], timeout=600))
    return name, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_every_shipped_preset_is_run() -> None:
    assert {path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")} == FITTED.keys()


def test_the_reward_rises(run: tuple[str, list[dict[str, Any]]]) -> None:
    name, records = run
    held_out = [
        record["val_sampled/arithmetic/reward_mean"]
        for record in records
        if "val_sampled/arithmetic/reward_mean" in record
    ]
    assert held_out[-1] > held_out[0] + 0.2, name

    steps = [record for record in records if record["step"] > 0]
    assert len(steps) == 20
    assert all(("critic/vf_loss" in record) == (name in CRITICS) for record in steps), name
    assert all(
        record["actor/skipped_steps"] == 0 for record in steps if "actor/skipped_steps" in record
    ), name

    if name == "dapo":
        assert sum(record["training/filtered_groups"] for record in steps) > 0
        assert all(record["training/num_gen_batches"] >= 1 for record in steps)
    else:
        scores = [record["critic/score/mean"] for record in steps]
        assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.1, name

    if name == "ppo":
        assert steps[-1].keys() >= PPO_METRICS, PPO_METRICS - steps[-1].keys()
        assert all(isinstance(steps[-1][metric], (int, float)) for metric in PPO_METRICS)
        passed, voted, once = (records[-1][f"{title}"] for title in (
            "val/arithmetic/pass@4", "val/arithmetic/maj@4", "val_sampled/arithmetic/acc@1"
        ))  # fmt: skip
        assert passed >= once and passed >= voted > 0.5
        assert 0 < steps[-1]["perf/mfu/actor"] < 1
