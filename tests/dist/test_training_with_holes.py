"""Updates from responses in which some tokens do not train equal those of the plain loop.

The tokens stand for a tool's answers. What the tables hold at their positions must not matter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrlhf.batch import Experience
from mrlhf.config.sections import ActorOptimSection, ActorSection, CriticSection, OptimSection
from mrlhf.device import Device
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.rl.correction import Correction, Criterion
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from tests import plain_losses, plain_ppo, rollouts
from tests.plain_ppo import Case, Outcome
from tests.ranks import run_ranks

WORLD_SIZE = 2
LAYOUTS = ((2, 1), (1, 2), (1, 1))  # tp, pp
MODEL = "llama"
# Row and tokens [begin, end) of each span that the policy did not draw: inside a response, at its
# begin, at its end, and two in one response.
HOLES = ((0, 1, 3), (2, 3, 7), (4, 0, 3), (6, 3, 5), (7, 2, 5), (7, 7, 8))
ALL_TERMS = {
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.3,
    "entropy_coeff": 0.05,
    "positive_lm_coef": 0.3,
}
BYPASS = {
    "sequence": Correction("sequence", None, plain_losses.THRESHOLD, normalise=False, criteria=()),
    "geo": Correction(
        None,
        None,
        1.0,
        normalise=False,
        criteria=(Criterion("seq_mean_k1", 1 / plain_losses.BAND, plain_losses.BAND),),
    ),
}
CASES = {
    "all terms": Case(MODEL, "token-mean", ALL_TERMS),
    "sequence means": Case(MODEL, "seq-mean-token-mean"),
    "weights and rejection": Case(MODEL, "seq-mean-token-mean", corrected=True, loss="gspo"),
    "covariance": Case(MODEL, "token-mean", loss="clip_cov"),
    "bypass, sequence weights": Case(
        MODEL, "seq-mean-token-sum", loss="reinforce", bypass="sequence"
    ),
    "bypass, rejection": Case(MODEL, "token-mean", bypass="geo"),
}


def with_holes(experience: Experience) -> Experience:
    """The same experience, in which the policy did not draw the tokens at `HOLES`."""
    not_drawn = torch.zeros_like(experience.loss_mask)
    for row, begin, end in HOLES:
        not_drawn[row, begin:end] = True
    assert (experience.rollout.response_mask[not_drawn]).all()

    return replace(
        experience,
        rollout=rollouts.with_holes(experience.rollout, not_drawn),
        loss_mask=experience.loss_mask & ~not_drawn,
    )


def experience_of(root: Path, case: Case) -> Experience:
    experience: Experience = torch.load(root / "experience", weights_only=False)
    if case.corrected:
        experience = plain_ppo.with_correction(experience)
    return with_holes(experience)


def optim_settings(case: Case) -> dict[str, Any]:
    beta1, beta2 = plain_ppo.BETAS
    return {
        "lr": plain_ppo.LR,
        "weight_decay": plain_ppo.WEIGHT_DECAY,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": plain_ppo.EPS,
        "clip_grad": case.clip_grad,
    }


def role_settings(case: Case, groups: RoleGroups) -> dict[str, Any]:
    return {
        "tp": groups.layout.tp,
        "pp": groups.layout.pp,
        "micro_batch_tokens": 20,
        "ppo_epochs": plain_ppo.EPOCHS,
        "loss_agg_mode": case.agg,
        "loss_scale_factor": plain_ppo.SCALE,
    }


def train_actor(root: Path, case: Case, groups: RoleGroups, out: Path) -> dict[str, float]:
    section = ActorSection(
        path=str(root / MODEL),
        clip_ratio_low=plain_losses.CLIP_LOW,
        clip_ratio_high=plain_losses.CLIP_HIGH,
        clip_ratio_c=plain_losses.CLIP_C,
        policy_loss={
            "clip_cov_ratio": plain_losses.COV_FRACTION,
            "clip_cov_lb": plain_losses.COV_BOUNDS[0],
            "clip_cov_ub": plain_losses.COV_BOUNDS[1],
        },
        optim=ActorOptimSection(**optim_settings(case)),
        **role_settings(case, groups),
        **case.settings,
    )
    spec = load_spec(section.path, "lm")
    bypass = None if case.bypass is None else BYPASS[case.bypass]
    cpu = Device("cpu", torch.device("cpu"), "gloo")
    actor = Actor(section, spec, groups, cpu, plain_ppo.TEMPERATURE, case.loss, bypass)
    actor.load(section.path, seed=0)
    actor.prepare(section.optim, total_updates=1)

    experience = experience_of(root, case)
    lengths = [len(tokens) for tokens in experience.rollout.sequences()]
    done = actor.update(experience, actor.plan(lengths, plain_ppo.MINI_BATCH))
    if bypass is not None:
        assert torch.equal(done.evaluated, experience.rollout.loss_mask)
    actor.export(out, 10**9)
    return done.metrics


def train_critic(root: Path, case: Case, groups: RoleGroups, out: Path) -> dict[str, float]:
    section = CriticSection(
        path=str(root / f"{MODEL}-critic"),
        cliprange_value=plain_ppo.CLIP_VALUE,
        optim=OptimSection(**optim_settings(case)),
        **role_settings(case, groups),
    )
    spec = load_spec(section.path, "scalar")
    critic = Critic(section, spec, groups, Device("cpu", torch.device("cpu"), "gloo"))
    critic.load(section.path, seed=0)
    critic.prepare(section.optim, total_updates=1)

    experience = experience_of(root, case)
    lengths = [len(tokens) for tokens in experience.rollout.sequences()]
    metrics = critic.update(experience, critic.plan(lengths, plain_ppo.MINI_BATCH))
    critic.export(out, 10**9)
    return metrics


def in_ranks(rank: int, world_size: int, root: str) -> dict[str, dict[str, float]]:
    """Metrics of actor and critic by layout and case; weights go below `root`."""
    torch.set_num_threads(1)
    factory = GroupFactory(timeout_s=120.0)
    where = Path(root)

    found: dict[str, dict[str, float]] = {}
    for tp, pp in LAYOUTS:
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, tp, pp))
        for name, case in CASES.items():
            label = f"tp{tp} pp{pp}, {name}"
            found[label] = train_actor(where, case, groups, where / label / "actor")
            if case.has_critic:
                found[label] |= train_critic(where, case, groups, where / label / "critic")
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and an experience without holes."""
    directory = tmp_path_factory.mktemp("holes")
    plain_ppo.save_models(directory)
    torch.save(plain_ppo.make_experience(directory / MODEL), directory / "experience")
    return directory


def expected_outcomes(root: Path, case: Case) -> dict[str, Outcome]:
    experience = experience_of(root, case)
    outcomes = {"actor": plain_ppo.train_actor(case, root / MODEL, experience)}
    if case.has_critic:
        outcomes["critic"] = plain_ppo.train_critic(case, root / MODEL, experience)
    return outcomes


def titled(title: str, message: str) -> str:
    return f"{title}: {message}"


def test_updates_equal_the_plain_loop(root: Path) -> None:
    ranks = run_ranks(WORLD_SIZE, in_ranks, str(root))
    expected = {name: expected_outcomes(root, case) for name, case in CASES.items()}

    assert len(ranks[0]) == len(LAYOUTS) * len(CASES)
    for label, metrics in ranks[0].items():
        assert all(rank[label] == metrics for rank in ranks), f"{label}: ranks differ"
        for role, outcome in expected[label.split(", ", 1)[1]].items():
            for name, value in outcome.metrics.items():
                assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (label, name)

            weights = load_file(root / label / role / "model.safetensors")
            assert weights.keys() == outcome.weights.keys()
            for name, tensor in weights.items():
                message = partial(titled, f"{label}: {name}")
                wanted = outcome.weights[name]
                torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-5, msg=message)


def test_the_holes_change_the_update(root: Path) -> None:
    for case in CASES.values():
        with_spans = expected_outcomes(root, case)
        whole: Experience = torch.load(root / "experience", weights_only=False)
        if case.corrected:
            whole = plain_ppo.with_correction(whole)
        without = plain_ppo.train_actor(case, root / MODEL, whole)
        norms = [outcome.metrics["actor/grad_norm"] for outcome in (with_spans["actor"], without)]
        assert abs(norms[0] - norms[1]) > 1e-3, (case, norms)
