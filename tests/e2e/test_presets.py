"""Each preset as shipped, laid over the arithmetic task: it learns, and says what it did.

The ranks of a preset run the launcher as forks of a server that has imported torch, which takes
seconds anew. `test_demo.py` starts the launcher with torchrun.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.programs import ROOT, read_lines
from tests.faults.runs import start
from tests.pages import commands_of

# What fits a preset's numbers to this task: the keys of the comment in its file, and a batch of a
# few hundred samples.
FITTED: dict[str, list[str]] = {
    "ppo": ["rollout.n=8"],
    "grpo": ["rollout.n=8"],
    "dr_grpo": [],
    "rloo": [],
    "reinforce_plus_plus": [],
    "flash_reinforce": ["actor.ppo_mini_batch_size=256", "data.train_batch_size=256"],
    "remax": ["rollout.n=4"],
    "dapo": ["rollout.n=8", "algorithm.overlong_buffer.len=2"],
    "gspo": ["rollout.n=8"],
    "cispo": ["rollout.n=8"],
    "gdpo": ["rollout.n=8"],
    "optimal_token_baseline": [],
    "online_dpo": ["actor.ppo_mini_batch_size=64"],
    "sao": ["trainer.critic_warmup=5", "data.train_batch_size=256"],
    "vapo": ["rollout.n=8", "trainer.critic_warmup=5", "algorithm.lam_length_alpha=1.0"],
}
# No core is as fast as this peak.
EXTRA: dict[str, list[str]] = {"ppo": ["trainer.val_n=4", "trainer.peak_tflops=10"]}
CRITICS = ("ppo", "vapo", "sao")
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
SCALARS = [
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/approx_kl",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "actor/reward_kl_penalty",
    "actor/reward_kl_penalty_coeff",
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vpred_mean",
    "critic/grad_norm",
    "critic/vf_explained_var",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/training_ppl",
    "rollout_corr/training_log_ppl",
    "rollout_corr/rollout_ppl",
    "rollout_corr/rollout_log_ppl",
    "rollout_corr/log_ppl_diff",
    "rollout_corr/log_ppl_abs_diff",
    "rollout_corr/log_ppl_diff_max",
    "rollout_corr/log_ppl_diff_min",
    "rollout_corr/ppl_ratio",
    "rollout_corr/chi2_token",
    "rollout_corr/chi2_seq",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_std",
    "training/rollout_probs_diff_valid",
    "training/rollout_actor_probs_pearson_corr",
    "response/aborted_ratio",
    "training/global_step",
    "training/epoch",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "perf/throughput",
    "perf/max_memory_allocated_gb",
    "perf/mfu/actor",
    "perf/mfu/critic",
    "train/imbalance/actor",
    "train/imbalance/critic",
]


def _ppo_metrics() -> set[str]:
    """Every name of the reference that a PPO run with a KL in the reward can measure."""
    names = set(SCALARS)
    for phase in PHASES:
        names |= {f"timing_s/{phase}", f"timing_per_token_ms/{phase}"}
    for table in ("score", "rewards", "advantages", "returns", "values"):
        names |= {f"critic/{table}/{kind}" for kind in SPREAD}
    for length in ("response_length", "response_length_non_aborted", "prompt_length"):
        names |= {f"{length}/{kind}" for kind in (*SPREAD, "clip_ratio")}
    return names


PPO_METRICS = _ppo_metrics()


@pytest.fixture(scope="module", params=FITTED)
def run(request: pytest.FixtureRequest, start_policy: Path) -> tuple[str, list[dict[str, Any]]]:
    """The preset's name, and its metrics of each step."""
    name = request.param
    root = start_policy
    files = [ROOT / "configs" / "arithmetic_cpu.yaml", ROOT / f"configs/algorithms/{name}.yaml"]
    keys = [
        f"actor.path={root}/sft/model",
        f"data.train_files={root}/data/train.jsonl",
        f"data.val_files={root}/data/validation.jsonl",
        f"trainer.output_dir={root}/{name}",
        "trainer.val_sampled=true",
        *FITTED[name],
        *EXTRA.get(name, []),
    ]

    arguments = ["--config", str(files[0]), "--config", str(files[1]), *keys]
    ended = start("ppo", arguments, root / f"{name}_logs", world_size=2).wait()
    assert ended.codes == [0, 0], ended.text[-8000:]
    return name, read_lines(root / name / "metrics.jsonl")


def test_every_shipped_preset_is_run() -> None:
    assert {path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")} == FITTED.keys()


def test_the_readme_runs_one_of_them() -> None:
    (command,) = commands_of("README.md", r"configs/arithmetic_cpu\.yaml")
    files = ["configs/arithmetic_cpu.yaml", "configs/algorithms/dr_grpo.yaml"]
    assert shlex.split(command)[-4:] == ["--config", files[0], "--config", files[1]]
    assert FITTED["dr_grpo"] == []


def test_the_reward_rises(run: tuple[str, list[dict[str, Any]]]) -> None:
    """Rewards are compared with what the start policy gets, of which half the answers are right.

    A run without learning ends within 0.03 of that, and one that learns at least 0.28 above.
    """
    name, records = run
    held_out = [
        record["val_sampled/arithmetic/reward_mean"]
        for record in records
        if "val_sampled/arithmetic/reward_mean" in record
    ]
    start, end = held_out
    assert end > start + 0.15, name

    steps = [record for record in records if record["step"] > 0]
    assert len(steps) == 20
    for record in steps:
        assert ("critic/vf_loss" in record) == (name in CRITICS), name
        assert record.get("actor/skipped_steps", 0) == 0, name

    if name == "dapo":
        assert sum(record["training/filtered_groups"] for record in steps) > 0
        assert all(record["training/num_gen_batches"] >= 1 for record in steps)
    else:
        scores = [record["critic/score/mean"] for record in steps]
        assert sum(scores[-5:]) / 5 > start + 0.15, name

    if name == "ppo":
        _assert_ppo_is_measured(records[-1], steps[-1])


def _assert_ppo_is_measured(last_record: dict[str, Any], last_step: dict[str, Any]) -> None:
    assert last_step.keys() >= PPO_METRICS, PPO_METRICS - last_step.keys()
    assert all(isinstance(last_step[metric], (int, float)) for metric in PPO_METRICS)
    assert 0 < last_step["perf/mfu/actor"] < 1
    assert 1 <= last_step["train/imbalance/actor"] < 2

    passed = last_record["val/arithmetic/pass@4"]
    voted = last_record["val/arithmetic/maj@4"]
    once = last_record["val_sampled/arithmetic/acc@1"]
    assert passed >= once
    assert passed >= voted > 0.5
