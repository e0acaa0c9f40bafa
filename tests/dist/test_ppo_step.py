"""Whole PPO steps, from configuration to updated weights, in four ranks: the same on every layout,
and as written down.

What the models compute is compared with transformers, what is made of it with loops in this file.
All runs share one spawn of ranks, since starting those is what costs time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from mrlhf.batch import Experience
from mrlhf.config import PPOConfig, load_config
from mrlhf.data.arithmetic import write_arithmetic
from mrlhf.device import Device
from mrlhf.errors import RewardError, TrainingError
from mrlhf.metrics import PhaseTimer
from mrlhf.parallel.groups import GroupFactory
from mrlhf.preflight import check, check_models
from mrlhf.rollout.collector import Collected
from mrlhf.run.startup import Run
from mrlhf.trainers.experience import ModelOutputs
from mrlhf.trainers.ppo import PPOTrainer
from mrlhf.trainers.ppo_setup import assemble
from tests import plain_ppo
from tests.ranks import run_ranks

WORLD_SIZE = 4
CPU = Device("cpu", torch.device("cpu"), "gloo")
MODEL, REWARD_MODEL = "llama", "qwen2-tied-critic"
KL_COEF, TARGET_KL, HORIZON = 0.2, 1e-4, 100
# Overrides of the base configuration; those in LAYOUTS must not change a number.
LAYOUTS: dict[str, list[str]] = {
    "tp2 pp2": [
        "actor.tp=2",
        "actor.pp=2",
        "critic.tp=2",
        "rollout.tp=2",
        "rollout.verify_reshard=true",
    ],
    "dp4": ["critic.pp=2", "critic.micro_batch_tokens=16", "reward_model.tp=2"],
    "tp2 dp2": [
        "actor.tp=2",
        "actor.sequence_parallel=true",
        "actor.micro_batch_tokens=16",
        "reward_model.pp=2",
    ],
}
ONCE = ["actor.ppo_epochs=1", "actor.ppo_mini_batch_size=8", "actor.micro_batch_tokens=16"]
FULL_KL = ["algorithm.kl_penalty=full", "actor.kl_loss_type=full"]
GRPO = ["algorithm.adv_estimator=grpo"]
BYPASS = [
    "algorithm.rollout_correction={preset: bypass_pg_geo_rs_seq_tis, rollout_rs_threshold: 1.5}",
    "algorithm.rollout_correction.rollout_is_threshold=1.1",
]
OTHERS: dict[str, list[str]] = {
    # One mini-batch, so that its only update must see the very log-probs of before.
    "terminal": ["algorithm.kl_placement=terminal", *ONCE],
    "warmup": ["actor.tp=2", "actor.pp=2", "trainer.critic_warmup=2"],
    "custom": ["reward.terms=[{name: CUSTOM:letters, weight: 2.0}]", "reward_model=null"],
    "raising": ["reward.terms=[{name: CUSTOM:breaks}]", "reward_model=null"],
    "stop": ["rollout.stop=['1', '2', '3', '4', '5', '+']"],
    "grpo, tp2 pp2": ["actor.tp=2", "actor.pp=2", "rollout.tp=2", *GRPO],
    "grpo, dp4": GRPO,
    "remax": ["algorithm.adv_estimator=remax", "algorithm.missing_eos_penalty=0.25"],
    "bypass, tp2 pp2": ["actor.tp=2", "actor.pp=2", *BYPASS],
    "bypass, dp4": BYPASS,
    "bypass, warmup": ["trainer.critic_warmup=2", *BYPASS],
    "dynamic sampling": [
        "algorithm.filter_groups={enable: true, max_num_gen_batches: 3}",
        "data.gen_batch_size=6",
        "reward.terms=[{name: CUSTOM:letters, weight: 2.0}]",
        "reward_model=null",
        *GRPO,
    ],
    "refill with a reward model": [
        "algorithm.filter_groups={enable: true, max_num_gen_batches: 3}",
        "data.gen_batch_size=4",
        "algorithm.adv_estimator=remax",
    ],
    "unusable gradients": [
        "actor.optim={lr: 1.0e-3, skip_grad_norm: 1.0e-9, max_skipped_steps: 3}"
    ],
    "full KL, tp2 pp2": ["actor.tp=2", "actor.pp=2", *FULL_KL],
    "full KL, dp4": FULL_KL,
}
CUSTOM = """
def letters(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 10, "digits": sum(c.isdigit() for c in solution_str)}


def breaks(data_source, solution_str, ground_truth, extra_info):
    raise ZeroDivisionError("no such number")
"""


def _base(root: Path) -> dict[str, Any]:
    # Why the eps is so large is said where it stands.
    trained = {
        "ppo_mini_batch_size": 4,
        "ppo_epochs": 2,
        "optim": {"lr": 1e-3, "adam_eps": plain_ppo.EPS},
    }
    return {
        "seed": 3,
        "actor": {"path": str(root / MODEL), "use_kl_loss": True, "kl_loss_coef": 0.1, **trained},
        "critic": {"path": str(root / f"{MODEL}-critic"), **trained},
        "reference": {"path": str(root / f"{MODEL}-ref")},
        "reward_model": {"path": str(root / REWARD_MODEL)},
        "reward": {"terms": [{"name": "exact_match"}, {"name": "reward_model", "weight": 0.5}]},
        "rollout": {"n": 2, "temperature": plain_ppo.TEMPERATURE, "dump_freq": 1},
        "data": {
            "train_files": str(root / "data" / "train.jsonl"),
            "tokenizer": str(root / "data" / "tokenizer"),
            "train_batch_size": 8,
            "max_prompt_length": 6,
            "max_response_length": 5,
        },
        "algorithm": {
            "use_kl_in_reward": True,
            "kl_ctrl": {
                "type": "adaptive",
                "kl_coef": KL_COEF,
                "target_kl": TARGET_KL,
                "horizon": HORIZON,
            },
        },
        "trainer": {"total_steps": 2, "output_dir": str(root / "runs")},
    }


class Watched(PPOTrainer):
    """Keeps the last step's experience."""

    experience: Experience

    def make_experience(
        self, collected: Collected, outputs: ModelOutputs, timer: PhaseTimer
    ) -> tuple[Experience, dict[str, float]]:
        self.experience, metrics = super().make_experience(collected, outputs, timer)
        return self.experience, metrics


def _fingerprint(role: Any) -> list[float]:
    return (
        [] if role is None else [slot.parameter.double().sum().item() for slot in role.engine.slots]
    )


def _steps(
    root: Path, name: str, overrides: list[str], rank: int, factory: GroupFactory
) -> list[dict[str, Any]]:
    """What came of each step: its metrics, its experience as lists, and the weights' sums before
    and after.
    """
    placed = [override.replace("CUSTOM", str(root / "rewards.py")) for override in overrides]
    config = load_config(PPOConfig, root / "base.yaml", placed)
    check(config, WORLD_SIZE)
    assert check_models(config) == []
    directory = root / "runs" / name
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(CPU, rank, WORLD_SIZE, factory, directory)
    trainer = Watched(config, run, assemble(config, run))
    steps = []
    try:
        for number in (1, 2):
            before = _fingerprint(trainer.parts.actor), _fingerprint(trainer.parts.critic)
            metrics = trainer.step(number)
            after = _fingerprint(trainer.parts.actor), _fingerprint(trainer.parts.critic)
            moved = [old != new for old, new in zip(before, after, strict=True)]
            steps.append({"metrics": metrics, "experience": trainer.experience, "moved": moved})
    finally:
        trainer.parts.scorer.close()
    return steps


def _in_ranks(rank: int, world_size: int, root: str) -> None:
    torch.set_num_threads(1)
    factory = GroupFactory(timeout_s=120.0)
    found: dict[str, Any] = {}
    for name, overrides in (LAYOUTS | OTHERS).items():
        try:
            found[name] = _steps(Path(root), name, overrides, rank, factory)
        except (RewardError, TrainingError) as error:
            found[name] = str(error)
    torch.save(found, Path(root) / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data, a user's reward functions, the configuration, and all runs."""
    directory = tmp_path_factory.mktemp("ppo")
    plain_ppo.save_models(directory)
    write_arithmetic(
        directory / "data", digits=2, operations="+", sft=40, train=20, held_out=4,
        wrong_fraction=0.0, wrong_kind="near", vocab_size=plain_ppo.SIZES["vocab_size"], seed=1,
    )  # fmt: skip
    (directory / "rewards.py").write_text(CUSTOM)
    (directory / "base.yaml").write_text(yaml.safe_dump(_base(directory)))
    run_ranks(WORLD_SIZE, _in_ranks, str(directory))
    return directory


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    """What each rank found in each run."""
    return [torch.load(root / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Without what a layout may change."""
    return {
        k: v
        for k, v in metrics.items()
        if not k.startswith(("timing", "perf/", "reshard/", "rollout/"))
    }


def _responses(experience: Experience) -> list[list[int]]:
    rollout = experience.rollout
    return [
        ids[:length]
        for ids, length in zip(rollout.response_ids.tolist(), rollout.response_lengths, strict=True)
    ]


@pytest.mark.parametrize(
    "family",
    [
        list(LAYOUTS),
        *([f"{name}, tp2 pp2", f"{name}, dp4"] for name in ("full KL", "grpo", "bypass")),
    ],
    ids=["layouts", "full KL", "grpo", "bypass"],
)
def test_a_step_is_the_same_on_every_layout(ranks: list[dict[str, Any]], family: list[str]) -> None:
    first = ranks[0][family[0]]
    for name in family:
        for number, step in enumerate(ranks[0][name]):
            wanted, title = first[number], f"{name}, step {number + 1}"
            assert _responses(step["experience"]) == _responses(wanted["experience"]), title
            for field in (
                "scores",
                "old_logprobs",
                "ref_logprobs",
                "values",
                "token_rewards",
                "advantages",
                "returns",
            ):
                found, expected = (getattr(s["experience"], field) for s in (step, wanted))
                if expected is None:
                    assert found is None
                    continue
                assert torch.allclose(found, expected, rtol=0, atol=1e-4), f"{title}: {field}"
            assert _comparable(step["metrics"]) == pytest.approx(
                _comparable(wanted["metrics"]), rel=1e-4, abs=2e-5
            ), title


def test_all_ranks_tell_the_same(ranks: list[dict[str, Any]]) -> None:
    for name in LAYOUTS:
        for rank in ranks[1:]:
            for step, wanted in zip(rank[name], ranks[0][name], strict=True):
                assert _comparable(step["metrics"]) == _comparable(wanted["metrics"])


def test_training_learns_something_to_compare(ranks: list[dict[str, Any]]) -> None:
    one, two = (step["metrics"] for step in ranks[0]["dp4"])
    for name in (
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/kl_loss",
        "actor/grad_norm",
        "critic/vf_loss",
    ):
        assert abs(one[name]) > 1e-4 and abs(one[name] - two[name]) > 1e-4, name
    assert len({tuple(response) for response in _responses(ranks[0]["dp4"][0]["experience"])}) > 8


def test_the_engine_and_the_trainer_agree(ranks: list[dict[str, Any]]) -> None:
    for name, steps in ranks[0].items():
        for number, step in enumerate(steps if isinstance(steps, list) else []):
            if name.startswith("bypass"):
                continue  # measured while the policy is trained
            assert step["metrics"]["training/rollout_probs_diff_max"] < 1e-5, (name, number)
            rollout = step["experience"].rollout
            assert (rollout.versions[rollout.loss_mask] == number).all()


def test_the_experience_is_what_the_models_say(ranks: list[dict[str, Any]], root: Path) -> None:
    experience, metrics = (ranks[0]["tp2 pp2"][0][key] for key in ("experience", "metrics"))
    rollout = experience.rollout
    logprobs, entropy = plain_ppo.evaluate(plain_ppo.load(root / MODEL), rollout)
    _close(experience.old_logprobs, logprobs)
    _close(
        experience.ref_logprobs,
        plain_ppo.evaluate(plain_ppo.load(root / f"{MODEL}-ref"), rollout)[0],
    )
    _close(
        experience.values, plain_ppo.token_values(plain_ppo.load(root / f"{MODEL}-critic"), rollout)
    )
    judge, scores = plain_ppo.load(root / REWARD_MODEL), []
    for sequence in rollout.sequences():
        with torch.no_grad():
            scores.append(judge.score(judge.model(torch.tensor([sequence]))[0])[0, -1].item() * 0.5)
    # No answer of a random model is right.
    assert metrics["reward/exact_match"] == 0.0
    _close(experience.scores, torch.tensor(scores))
    assert metrics["actor/entropy"] == pytest.approx(
        entropy[rollout.response_mask].mean().item(), abs=1e-5
    )


@pytest.mark.parametrize("name", ["dp4", "terminal"])
def test_rewards_and_advantages_by_hand(ranks: list[dict[str, Any]], name: str) -> None:
    experience = ranks[0][name][0]["experience"]
    kl = (experience.old_logprobs - experience.ref_logprobs).double()
    rewards, returns = torch.zeros_like(kl), torch.zeros_like(kl)
    for row, length in enumerate(experience.rollout.response_lengths):
        if name == "terminal":
            rewards[row, length - 1] = -KL_COEF * kl[row, :length].sum()
        else:
            rewards[row, :length] = -KL_COEF * kl[row, :length]
        rewards[row, length - 1] += experience.scores[row]
        for t in range(length):  # gamma = lambda = 1: all the reward to come
            returns[row, t] = rewards[row, t:length].sum()
    mask = experience.rollout.response_mask
    advantages = (returns - experience.values)[mask]
    _close(experience.token_rewards, rewards)
    _close(experience.returns, returns)
    _close(experience.advantages[mask], (advantages - advantages.mean()) / advantages.std())
    assert not experience.advantages[~mask].any()


def test_the_adaptive_coefficient_moves_by_its_formula(ranks: list[dict[str, Any]]) -> None:
    one, two = (step["metrics"] for step in ranks[0]["dp4"])
    assert one["actor/reward_kl_penalty_coeff"] == KL_COEF
    assert (
        one["actor/reward_kl_penalty"] > 2 * TARGET_KL
    )  # so the error is clipped to 0.2; a step has 16 samples
    assert two["actor/reward_kl_penalty_coeff"] == pytest.approx(
        KL_COEF * (1 + 0.2 * 16 / HORIZON), rel=1e-12
    )


def test_full_kl_is_that_of_the_distributions(ranks: list[dict[str, Any]], root: Path) -> None:
    step = ranks[0]["full KL, tp2 pp2"][0]
    rollout = step["experience"].rollout
    kl = plain_ppo.full_kl(
        plain_ppo.load(root / MODEL), plain_ppo.load(root / f"{MODEL}-ref"), rollout
    )
    mean = (kl.sum(dim=1) / rollout.response_mask.sum(dim=1)).mean().item()
    assert step["metrics"]["actor/reward_kl_penalty"] == pytest.approx(mean, abs=1e-5)


def test_the_first_update_sees_the_ratio_one(ranks: list[dict[str, Any]]) -> None:
    for step in ranks[0]["terminal"]:
        assert (
            step["metrics"]["actor/ppo_kl"] == 0.0 and step["metrics"]["actor/pg_clipfrac"] == 0.0
        )
        assert step["moved"] == [True, True]


def test_warm_up_leaves_the_actor_alone(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert [step["moved"] for step in rank["warmup"]] == [[False, True], [True, True]]
        assert [step["moved"] for step in rank["dp4"]] == [[True, True], [True, True]]
        one, two = (step["metrics"] for step in rank["warmup"])
        assert "actor/pg_loss" not in one and "actor/pg_loss" in two
        assert "critic/vf_loss" in one


def test_group_relative_advantages_by_hand_and_without_a_critic(
    ranks: list[dict[str, Any]],
) -> None:
    for step in ranks[0]["grpo, dp4"]:
        experience = step["experience"]
        assert experience.values is None
        assert not any(
            name.startswith(("critic/vf", "critic/values", "timing_s/values"))
            for name in step["metrics"]
        )
        totals = experience.token_rewards.double().sum(dim=1).view(-1, 2)
        wanted = (totals - totals.mean(dim=1, keepdim=True)) / (
            totals.std(dim=1, keepdim=True) + 1e-6
        )
        mask = experience.rollout.response_mask
        _close(experience.advantages, torch.where(mask, wanted.reshape(-1, 1), 0.0))
        assert step["moved"] == [True, False]


def test_remax_takes_off_what_the_greedy_answer_gets(
    ranks: list[dict[str, Any]], root: Path
) -> None:
    step = ranks[0]["remax"][0]
    experience, rollout = step["experience"], step["experience"].rollout
    policy, judge = plain_ppo.load(root / MODEL), plain_ppo.load(root / REWARD_MODEL)
    eos, baselines = 2, []
    for prompt in rollout.prompts.token_ids[::2]:
        tokens, stopped = list(prompt), False
        while len(tokens) < len(prompt) + 5 and not stopped:
            with torch.no_grad():
                tokens.append(int(policy(torch.tensor([tokens])).logits[0, -1].argmax()))
            stopped = tokens[-1] == eos
        with torch.no_grad():
            score = judge.score(judge.model(torch.tensor([tokens]))[0])[0, -1].item() * 0.5
        baselines.append(score - (0.0 if stopped else 0.25))
    to_come = experience.token_rewards.flip(1).cumsum(1).flip(1)
    baseline = torch.tensor(baselines).repeat_interleave(2)[:, None]
    _close(experience.advantages, torch.where(rollout.response_mask, to_come - baseline, 0.0))
    assert step["metrics"]["critic/greedy_score/mean"] == pytest.approx(
        sum(baselines) / 8, abs=1e-5
    )


def test_bypass_takes_the_engines_word_and_still_measures_the_mismatch(
    ranks: list[dict[str, Any]],
) -> None:
    for step in ranks[0]["bypass, dp4"]:
        experience, metrics = step["experience"], step["metrics"]
        assert torch.equal(experience.old_logprobs, experience.rollout.rollout_logprobs)
        assert "timing_s/old_log_prob" not in metrics
        assert metrics["actor/entropy"] > 1.0
        # The first of two mini-batches sees the policy that generated, the second one that has been
        # trained once.
        assert 0 < metrics["rollout_corr/k3_kl"] < 1e-2
        assert 1e-5 < metrics["training/rollout_probs_diff_max"] < 0.1
        assert 0.9 < metrics["rollout_corr/rollout_is_mean"] < 1.1
        assert 0.0 <= metrics["rollout_corr/rollout_rs_masked_fraction"] < 1.0


def test_bypass_measures_the_mismatch_also_while_the_critic_warms_up(
    ranks: list[dict[str, Any]],
) -> None:
    one, two = (step["metrics"] for step in ranks[0]["bypass, warmup"])
    for metrics in (one, two):
        assert (
            abs(metrics["rollout_corr/kl"]) < 0.1
            and metrics["training/rollout_probs_diff_max"] < 0.1
        )
        assert metrics["actor/entropy"] > 1.0
    assert "timing_s/old_log_prob" in one and "timing_s/old_log_prob" not in two


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(
    ranks: list[dict[str, Any]],
) -> None:
    for step in ranks[0]["dynamic sampling"]:
        experience, metrics = step["experience"], step["metrics"]
        differing = sum(len(set(pair.tolist())) > 1 for pair in experience.scores.view(-1, 2))
        assert len(experience.rollout) == 16
        assert 8 - differing == metrics["training/uninformative_groups"]
        assert 2 <= metrics["training/num_gen_batches"] <= 3
        assert metrics["training/generated_groups"] == 6 * metrics["training/num_gen_batches"]
        assert metrics["training/filtered_groups"] > 0


def test_a_refill_has_the_weights_again_after_a_reward_model_had_the_memory(
    ranks: list[dict[str, Any]],
) -> None:
    for number, step in enumerate(ranks[0]["refill with a reward model"]):
        experience, metrics = step["experience"], step["metrics"]
        assert metrics["training/num_gen_batches"] >= 2 and len(experience.rollout) == 16
        rollout = experience.rollout
        assert (rollout.versions[rollout.loss_mask] == number).all()
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert metrics["critic/greedy_score/mean"] != 0.0


def test_the_mismatch_is_measured_in_every_step(ranks: list[dict[str, Any]]) -> None:
    names = (
        "kl",
        "k3_kl",
        "training_ppl",
        "rollout_ppl",
        "log_ppl_diff",
        "ppl_ratio",
        "chi2_token",
        "chi2_seq",
    )
    for step in ranks[0]["dp4"]:
        found = [step["metrics"][f"rollout_corr/{name}"] for name in names]
        assert found == pytest.approx([0, 0, found[2], found[2], 0, 1, 0, 0], abs=1e-4)
        assert found[2] > 5


def test_a_run_whose_gradients_are_not_usable_ends_and_leaves_its_batch(
    ranks: list[dict[str, Any]], root: Path
) -> None:
    path = root / "runs" / "unusable gradients" / "failed_step_000001.pt"
    for rank in ranks:
        assert rank["unusable gradients"].startswith("training step 1: 3 optimizer steps in a row")
        assert rank["unusable gradients"].endswith(f"the batch is in {path}")
    batch = torch.load(path, weights_only=True)
    assert batch["advantages"].shape == batch["response_ids"].shape == batch["response_mask"].shape
    assert len(batch["prompts"]) == len(batch["advantages"]) == 16


def test_a_users_function_scores(ranks: list[dict[str, Any]], root: Path) -> None:
    for number, step in enumerate(ranks[0]["custom"], start=1):
        rows = (
            (root / "runs" / "custom" / "rollouts" / f"step_{number:06d}.jsonl")
            .read_text()
            .splitlines()
        )
        dumped = [json.loads(row) for row in rows]
        assert len(dumped) == 16
        letters = [len(row["response"]) / 10 for row in dumped]
        assert [row["score"] for row in dumped] == pytest.approx([2 * score for score in letters])
        _close(step["experience"].scores, 2 * torch.tensor(letters))
        assert step["metrics"]["reward/letters"] == pytest.approx(sum(letters) / 16)
        digits = [sum(character.isdigit() for character in row["response"]) for row in dumped]
        assert step["metrics"]["reward/letters/digits"] == pytest.approx(sum(digits) / 16)


def test_a_stop_string_ends_a_response_as_a_stop_token_does(
    ranks: list[dict[str, Any]], root: Path
) -> None:
    by_string = 0
    for number, step in enumerate(ranks[0]["stop"], start=1):
        rows = (
            (root / "runs" / "stop" / "rollouts" / f"step_{number:06d}.jsonl")
            .read_text()
            .splitlines()
        )
        dumped = [json.loads(row) for row in rows]
        for row in dumped:
            first = next(
                (i for i, character in enumerate(row["response"]) if character in "12345+"), None
            )
            assert first is None or row["stopped"], row
            by_string += first is not None
        rollout = step["experience"].rollout
        lengths = rollout.response_lengths
        cut = sum(not row["stopped"] for row in dumped) / len(dumped)
        assert step["metrics"]["response_length/clip_ratio"] == pytest.approx(cut)
        assert all(
            length == 5
            for length, stopped in zip(lengths, rollout.stopped, strict=True)
            if not stopped
        )
    assert by_string > 4
    assert _responses(ranks[0]["stop"][0]["experience"]) != _responses(
        ranks[0]["dp4"][0]["experience"]
    )


def test_a_users_function_that_raises_is_named(ranks: list[dict[str, Any]], root: Path) -> None:
    for rank in ranks:
        message = rank["raising"]
        assert (
            f"reward function breaks of {root / 'rewards.py'} raised ZeroDivisionError: no such number"
            in message
        )
        assert "\n" not in message


def _close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=2e-5)
