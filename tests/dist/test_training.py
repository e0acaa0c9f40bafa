"""The contract of training: on every layout, packing and optimizer the updates are those of the
plain loop.

Metrics, gradient norms and updated weights of actor and critic are compared with `tests.plain_ppo`;
all that needs the same number of ranks shares one spawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mrlhf.batch import Experience
from mrlhf.config.sections import (
    ActorOptimSection,
    ActorSection,
    CriticSection,
    OptimSection,
    PolicyLossSection,
    ReferenceSection,
)
from mrlhf.device import Device
from mrlhf.errors import TrainingError
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.rl.correction import Correction, Criterion
from mrlhf.rl.names import PolicyLossName
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.roles.reference import Reference
from mrlhf.training.engine import ModelEngine
from tests import plain_losses, plain_ppo
from tests.plain_ppo import Case, Outcome
from tests.ranks import run_ranks

CPU = Device("cpu", torch.device("cpu"), "gloo")
LAYOUTS = {
    1: [(1, 1)],
    2: [(2, 1), (1, 2), (1, 1)],
    4: [(2, 2), (2, 1), (1, 2)],
}  # world size -> (tp, pp)
MODELS = ("llama", "qwen2-tied")
NEAR = {
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.3,
    "entropy_coeff": 0.05,
}
FULL = {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.3}
TRUST = {"clip_ratio_low": plain_losses.TRUST_LOW, "clip_ratio_high": plain_losses.TRUST_HIGH}
BASIC_CASES = (
    "plain",
    "clipped gradient",
    "sampled KL and entropy",
    "full KL",
    "entropy",
    "weights and rejection",
)
CASES = {
    "plain": Case("llama", "token-mean"),
    "clipped gradient": Case("qwen2-tied", "token-sum", clip_grad=1.0),
    "sampled KL and entropy": Case("qwen2-tied", "seq-mean-token-mean", NEAR),
    "full KL": Case("llama", "seq-mean-token-sum-norm", FULL),
    "entropy": Case("llama", "seq-mean-token-sum", {"entropy_coeff": -0.2}, clip_grad=1.0),
    "weights and rejection": Case("llama", "token-mean", NEAR, corrected=True),
    "rejection by sequence means": Case(
        "llama", "seq-mean-token-mean", corrected=True, loss="gspo"
    ),
    "weights of a geometric mean": Case(
        "llama", "seq-mean-token-mean", corrected=True, loss="geo_mean"
    ),
    "a gradient that is no number": Case("llama", "token-mean", broken=True),
    "positive examples": Case("llama", "token-mean", {"positive_lm_coef": 0.3}),
    "bypass, reinforce": Case("llama", "token-mean", loss="reinforce", bypass="reinforce"),
    "bypass, sequence weights": Case(
        "llama", "seq-mean-token-sum", loss="reinforce", bypass="sequence"
    ),
    "bypass, rejection": Case("llama", "token-mean", bypass="geo"),
} | {
    loss: Case(
        "llama",
        "seq-mean-token-mean" if loss in ("gspo", "sapo", "geo_mean") else "token-mean",
        TRUST if loss.startswith("dppo") else {},
        loss=loss,
    )
    for loss in get_args(PolicyLossName)
    if loss not in ("vanilla", "reinforce")
}
UNCLIPPED = ("sapo", "gpg", "reinforce", "surrogate", "kl_cov")
CLIPPED_BELOW = ("vanilla", "geo_mean")
COVARIANCE = PolicyLossSection(
    clip_cov_ratio=plain_losses.COV_FRACTION,
    clip_cov_lb=plain_losses.COV_BOUNDS[0],
    clip_cov_ub=plain_losses.COV_BOUNDS[1],
    kl_cov_ratio=plain_losses.COV_FRACTION,
    ppo_kl_coef=plain_losses.PPO_KL_COEF,
)
BYPASS = {
    "reinforce": Correction("token", None, plain_losses.THRESHOLD, normalise=True, criteria=()),
    "sequence": Correction("sequence", None, plain_losses.THRESHOLD, normalise=False, criteria=()),
    "geo": Correction(
        None,
        None,
        1.0,
        False,
        (Criterion("seq_mean_k1", 1 / plain_losses.BAND, plain_losses.BAND),),
    ),
}


@dataclass(frozen=True)
class Form:
    """How a role is run, which must not matter, and which of the cases and models are run so on
    every layout.
    """

    cases: tuple[str, ...]
    models: tuple[str, ...]
    micro_batch_tokens: int
    distributed_optimizer: bool
    sequence_parallel: bool = False
    recompute: str = "none"

    def settings(self, groups: RoleGroups) -> dict[str, Any]:
        """The role section's keys."""
        return {
            "tp": groups.layout.tp,
            "pp": groups.layout.pp,
            "sequence_parallel": self.sequence_parallel,
            "recompute": self.recompute,
            "micro_batch_tokens": self.micro_batch_tokens,
        }


# 12 tokens are the longest sequence; all sequences of a mini-batch fit into 1000.
FULL_LAYOUTS = ((1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 1, 1), (4, 2, 2))
SAFETY_FORMS = ("one pack", "sequence-parallel")  # without and with the distributed optimizer
SAFETY_LAYOUTS = ((1, 1, 1), (4, 2, 1))  # world size, tp, pp; the others share the code
FORMS = {
    "many packs": Form(tuple(CASES), MODELS, 12, distributed_optimizer=True),
    "one pack": Form(
        ("sampled KL and entropy", "entropy"), ("llama",), 1000, distributed_optimizer=False
    ),
    "sequence-parallel": Form(
        ("clipped gradient", "full KL"),
        ("qwen2-tied",),
        20,
        distributed_optimizer=True,
        sequence_parallel=True,
        recompute="full",
    ),
}


def _forms(tp: int) -> Iterator[tuple[str, Form]]:
    return ((name, form) for name, form in FORMS.items() if tp > 1 or not form.sequence_parallel)


def _engine(section: Any, groups: RoleGroups, head: Any) -> ModelEngine:
    engine = ModelEngine(section, load_spec(section.path, head), groups, CPU)
    engine.load(section.path, seed=0)
    return engine


def _actor(root: Path, case: Case, form: Form, groups: RoleGroups, **changes: Any) -> Actor:
    settings: dict[str, Any] = {
        "path": str(root / case.model),
        "ppo_epochs": plain_ppo.EPOCHS,
        "clip_ratio_low": plain_losses.CLIP_LOW,
        "clip_ratio_high": plain_losses.CLIP_HIGH,
        "clip_ratio_c": plain_losses.CLIP_C,
        "tau_pos": plain_losses.TAU_POS,
        "tau_neg": plain_losses.TAU_NEG,
        "policy_loss": COVARIANCE,
        "loss_agg_mode": case.agg,
        "loss_scale_factor": plain_ppo.SCALE,
    }
    settings |= (
        form.settings(groups)
        | case.settings
        | {"optim": _optim(ActorOptimSection, case, form)}
        | changes
    )
    bypass = None if case.bypass is None else BYPASS[case.bypass]
    section = ActorSection(**settings)
    engine = _engine(section, groups, "lm")
    engine.attach_optimizer(section.optim, total_updates=1)
    return Actor(engine, PolicyLossSettings.named(case.loss, section, bypass), plain_ppo.TEMPERATURE)


def _critic(root: Path, case: Case, form: Form, groups: RoleGroups) -> Critic:
    section = CriticSection(
        path=str(root / f"{case.model}-critic"),
        ppo_epochs=plain_ppo.EPOCHS,
        cliprange_value=plain_ppo.CLIP_VALUE,
        loss_agg_mode=case.agg,
        loss_scale_factor=plain_ppo.SCALE,
        optim=_optim(OptimSection, case, form),
        **form.settings(groups),
    )
    engine = _engine(section, groups, "scalar")
    engine.attach_optimizer(section.optim, total_updates=1)
    return Critic(engine, section)


def _reference(root: Path, case: Case, form: Form, groups: RoleGroups) -> Reference:
    section = ReferenceSection(path=str(root / f"{case.model}-ref"), **form.settings(groups))
    return Reference(_engine(section, groups, "lm"), plain_ppo.TEMPERATURE)


def _optim(make: type[OptimSection], case: Case, form: Form) -> OptimSection:
    beta1, beta2 = plain_ppo.BETAS
    return make(
        lr=plain_ppo.LR,
        weight_decay=plain_ppo.WEIGHT_DECAY,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=plain_ppo.EPS,
        clip_grad=case.clip_grad,
        use_distributed_optimizer=form.distributed_optimizer,
    )


def _experience(root: Path, model: str, corrected: bool = False) -> Experience:
    experience: Experience = torch.load(root / f"{model}.experience", weights_only=False)
    return plain_ppo.with_correction(experience) if corrected else experience


def _experience_of(root: Path, case: Case) -> Experience:
    experience = _experience(root, case.model, case.corrected)
    return plain_ppo.broken(experience) if case.broken else experience


def _train(root: Path, name: str, form: Form, groups: RoleGroups, out: Path) -> dict[str, float]:
    """Update actor and critic from the same experience; their weights go to `out`, their metrics
    are returned.
    """
    case = CASES[name]
    experience = _experience_of(root, case)
    rollout = experience.rollout
    actor = _actor(root, case, form, groups)
    cut = actor.cut(rollout, plain_ppo.MINI_BATCH)
    ref_logits = None
    if case.settings.get("kl_loss_type") == "full":
        ref_logits = _reference(root, case, form, groups).logits(cut)
    metrics = actor.update(experience, cut, ref_logits).metrics
    actor.engine.export(out / "actor", 10**9)
    if case.has_critic:
        critic = _critic(root, case, form, groups)
        metrics |= critic.update(experience, critic.cut(rollout, plain_ppo.MINI_BATCH))
        critic.engine.export(out / "critic", 10**9)
    return metrics


def _look(root: Path, model: str, form: Form, groups: RoleGroups) -> dict[str, Tensor]:
    """All that is evaluated and not trained."""
    rollout, case = _experience(root, model).rollout, Case(model, "token-mean")
    actor, critic = _actor(root, case, form, groups), _critic(root, case, form, groups)
    reference = _reference(root, case, form, groups)
    cut = actor.cut(rollout, plain_ppo.MINI_BATCH)
    evaluation = actor.evaluate(rollout, cut, reference.logits(cut))
    assert evaluation.full_kl is not None
    return {
        "logprobs": evaluation.logprobs,
        "entropy": evaluation.entropy,
        "full_kl": evaluation.full_kl,
        "ref_logprobs": reference.logprobs(rollout),
        "values": critic.values(rollout, critic.cut(rollout, plain_ppo.MINI_BATCH)),
    }


def _first_update(
    root: Path, model: str, form: Form, groups: RoleGroups, dtype: str = "float32"
) -> dict[str, Any]:
    """Metrics of one mini-batch whose old log-probs the same actor has just evaluated, and those
    log-probs.

    The `abs` KL to them is a sum of sizes, so it is 0 only where every token's log-prob is the
    same.
    """
    settings = {"use_kl_loss": True, "kl_loss_type": "abs", "entropy_coeff": 0.1}
    actor = _actor(
        root, Case(model, "token-mean", settings), form, groups, ppo_epochs=1, dtype=dtype
    )
    experience = _experience(root, model)
    cut = actor.cut(experience.rollout, len(experience.rollout))
    logprobs = actor.evaluate(experience.rollout, cut).logprobs
    fresh = replace(experience, old_logprobs=logprobs, ref_logprobs=logprobs)
    return {**actor.update(fresh, cut).metrics, "logprobs": logprobs.tolist()}


def _stops_and_skips(root: Path, form: Form, groups: RoleGroups) -> dict[str, Any]:
    """Metrics of updates that end early or skip steps, and whether the weights moved."""
    experience = _experience(root, "llama")
    case = Case("llama", "token-mean")
    found: dict[str, Any] = {}

    def run(
        name: str,
        change: Callable[[Tensor, Tensor], Experience],
        optim: dict[str, Any],
        **keys: Any,
    ) -> None:
        settings = _optim(ActorOptimSection, case, form).model_copy(update=optim)
        actor = _actor(root, case, form, groups, optim=settings, **keys)
        cut = actor.cut(experience.rollout, plain_ppo.MINI_BATCH)
        logprobs = actor.evaluate(experience.rollout, cut).logprobs
        before = [slot.parameter.double().sum().item() for slot in actor.engine.slots]
        try:
            found[name] = actor.update(change(logprobs, experience.advantages.clone()), cut).metrics
        except TrainingError as error:
            found[name] = {"error": str(error)}
        after = [slot.parameter.double().sum().item() for slot in actor.engine.slots]
        found[name]["moved"] = float(before != after)

    def far(logprobs: Tensor, advantages: Tensor) -> Experience:
        shift = torch.where(
            torch.arange(len(logprobs)) < plain_ppo.MINI_BATCH, 0.0, 0.2
        )  # the second mini-batch
        return replace(experience, old_logprobs=logprobs + shift[:, None])

    def all_far(logprobs: Tensor, advantages: Tensor) -> Experience:
        return replace(experience, old_logprobs=logprobs + 0.2)

    def broken(logprobs: Tensor, advantages: Tensor) -> Experience:
        advantages[-1, 0] = float("nan")
        return replace(experience, old_logprobs=logprobs, advantages=advantages)

    run("stopped", far, {}, target_kl_stop=0.1)
    run("stopped at once", all_far, {}, target_kl_stop=0.1)
    run("near enough", far, {"lr": 0.0}, target_kl_stop=0.3)
    run("one broken mini-batch", broken, {"max_skipped_steps": 2})
    run("too large", far, {"skip_grad_norm": 1e-6, "max_skipped_steps": 3})
    run("too large, patient", far, {"skip_grad_norm": 1e-6, "max_skipped_steps": 5})
    return found


def _in_ranks(rank: int, world_size: int, root: str) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    factory, where = GroupFactory(timeout_s=120.0), Path(root)
    found: dict[str, dict[str, Any]] = {
        "trained": {},
        "evaluated": {},
        "first": {},
        "bfloat16": {},
        "safety": {},
    }
    for tp, pp in LAYOUTS[world_size]:
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, tp, pp))
        for form_name, form in _forms(tp):
            layout = f"tp{tp} pp{pp} dp{groups.layout.dp} {form_name}"
            # In four ranks the other losses run on the deepest layout alone: building models takes
            # the time.
            cases = (
                form.cases
                if (world_size, tp, pp) in FULL_LAYOUTS
                else [c for c in form.cases if c in BASIC_CASES]
            )
            for case in cases:
                label = f"{layout}, {case}"
                found["trained"][label] = _train(
                    where, case, form, groups, where / str(world_size) / label
                )
            for model in form.models:
                label = f"{layout}, {model}"
                looks = _look(where, model, form, groups)
                found["evaluated"][label] = {name: table.tolist() for name, table in looks.items()}
                found["first"][label] = _first_update(where, model, form, groups)
            if form_name in SAFETY_FORMS and (world_size, tp, pp) in SAFETY_LAYOUTS:
                found["safety"][layout] = _stops_and_skips(where, form, groups)
            if (tp, pp) == (2, 2) and form.sequence_parallel:
                found["bfloat16"] = _first_update(where, "llama", form, groups, dtype="bfloat16")
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and, for each, an experience."""
    directory = tmp_path_factory.mktemp("training")
    plain_ppo.save_models(directory)
    for model in MODELS:
        torch.save(plain_ppo.make_experience(directory / model), directory / f"{model}.experience")
    return directory


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, dict[str, Outcome]]:
    """Actor and, where there is one, critic of each case, as the plain loop trains them."""
    outcomes = {}
    for name, case in CASES.items():
        experience, model = _experience_of(root, case), root / case.model
        outcomes[name] = {"actor": plain_ppo.train_actor(case, model, experience)}
        if case.has_critic:
            outcomes[name]["critic"] = plain_ppo.train_critic(case, model, experience)
    return outcomes


@pytest.fixture(scope="module", params=LAYOUTS)
def world(
    request: pytest.FixtureRequest, root: Path
) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    """Where the weights went, and what each rank found."""
    return root / str(request.param), run_ranks(request.param, _in_ranks, str(root))


def test_the_plain_loop_meets_every_branch(expected: dict[str, dict[str, Outcome]]) -> None:
    for name, outcomes in expected.items():
        if CASES[name].broken:
            continue
        for metric, value in (
            pair for outcome in outcomes.values() for pair in outcome.metrics.items()
        ):
            clips = metric == "actor/pg_clipfrac" and CASES[name].loss not in UNCLIPPED
            clips |= (
                metric == "actor/pg_clipfrac_lower"
                and CASES[name].loss in CLIPPED_BELOW
                and not CASES[name].bypass
            )
            assert math.isfinite(value), (name, metric, value)
            assert value != 0 or (metric.startswith("actor/pg_clipfrac") and not clips), (
                name,
                metric,
                value,
            )
        for role, outcome in outcomes.items():
            assert outcome.metrics[f"{role}/grad_norm"] > CASES[name].clip_grad


def _named(title: str, message: str) -> str:
    return f"{title}: {message}"


def test_updates_equal_the_plain_loop(world: Any, expected: dict[str, dict[str, Outcome]]) -> None:
    directory, ranks = world
    labels = ranks[0]["trained"]
    assert {label.split(", ", 1)[1] for label in labels} == CASES.keys()
    for label, metrics in labels.items():
        assert all(rank["trained"][label] == metrics for rank in ranks), (
            f"{label}: ranks tell different metrics"
        )
        case = CASES[label.split(", ", 1)[1]]
        for role, outcome in expected[label.split(", ", 1)[1]].items():
            for name, value in outcome.metrics.items():
                if case.broken and name != "actor/grad_norm":
                    continue  # what a skipped mini-batch adds to the others is ours to choose
                assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), f"{label}: {name}"
            weights = load_file(directory / label / role / "model.safetensors")
            assert weights.keys() == outcome.weights.keys()
            for name, tensor in weights.items():
                # Four steps of up to 1e-2. Gradients are rounded by up to 1e-6, so a step by up to
                # 1e-2 * 1e-6 / EPS.
                torch.testing.assert_close(
                    tensor,
                    outcome.weights[name],
                    rtol=0,
                    atol=1e-5,
                    msg=partial(_named, f"{label}: {name}"),
                )


def test_evaluations_equal_transformers(world: Any, root: Path) -> None:
    for model in MODELS:
        experience, path = _experience(root, model), root / model
        rollout = experience.rollout
        policy, reference = plain_ppo.load(path), plain_ppo.load(root / f"{model}-ref")
        logprobs, entropy = plain_ppo.evaluate(policy, rollout)
        wanted = {
            "logprobs": logprobs,
            "entropy": entropy,
            "full_kl": plain_ppo.full_kl(policy, reference, rollout),
            "ref_logprobs": experience.ref_logprobs,
            "values": plain_ppo.token_values(plain_ppo.load(root / f"{model}-critic"), rollout),
        }
        for rank in world[1]:
            found = {
                label: looks for label, looks in rank["evaluated"].items() if label.endswith(model)
            }
            assert found
            for label, looks in found.items():
                for name, table in wanted.items():
                    torch.testing.assert_close(
                        torch.tensor(looks[name]),
                        table,
                        rtol=0,
                        atol=2e-5,
                        msg=partial(_named, f"{label}: {name}"),
                    )


def test_in_the_first_mini_batch_every_ratio_is_one(world: Any) -> None:
    for label, metrics in world[1][0]["first"].items():
        assert metrics["actor/kl_loss"] == 0.0, label
        assert metrics["actor/ppo_kl"] == 0.0, label
        assert metrics["actor/pg_clipfrac"] == 0.0, label
        assert metrics["actor/grad_norm"] > 0.1, label


@pytest.mark.parametrize("world", [1, 4], indirect=True)
def test_an_update_ends_before_the_step_that_is_too_far(world: Any) -> None:
    for rank in world[1]:
        assert rank["safety"]
        for layout, found in rank["safety"].items():
            stopped = found["stopped"]
            assert (
                stopped["actor/kl_stopped"],
                stopped["actor/optimizer_steps"],
                stopped["moved"],
            ) == (1, 1, 1), layout
            assert stopped["actor/ppo_kl"] == 0.0, (
                layout
            )  # of the one mini-batch that was trained on
            assert 0.1 < stopped["actor/kl_at_stop"] < 1.0, layout
            at_once = found["stopped at once"]
            assert (at_once["actor/optimizer_steps"], at_once["moved"]) == (0, 0), layout
            assert (
                at_once["actor/ppo_kl"]
                == at_once["actor/kl_at_stop"]
                == pytest.approx(0.2, abs=1e-5)
            ), layout
            near = found["near enough"]
            assert (near["actor/kl_stopped"], near["actor/optimizer_steps"]) == (0, 4), layout
            # The second mini-batch has 24 of 41 tokens, and nothing moves.
            assert near["actor/ppo_kl"] == pytest.approx(0.2 * 24 / 41, abs=1e-5), layout


@pytest.mark.parametrize("world", [1, 4], indirect=True)
def test_unusable_gradients_are_skipped_and_end_the_run(world: Any) -> None:
    for rank in world[1]:
        assert rank["safety"]
        for layout, found in rank["safety"].items():
            broken = found["one broken mini-batch"]
            assert (
                broken["actor/skipped_steps"],
                broken["actor/optimizer_steps"],
                broken["moved"],
            ) == (2, 2, 1), layout
            assert all(math.isfinite(value) for value in broken.values()), layout
            assert found["too large"]["moved"] == 0, layout
            assert found["too large"]["error"].startswith("3 optimizer steps in a row"), layout
            assert "limit skip_grad_norm 1e-06" in found["too large"]["error"], layout
            patient = found["too large, patient"]
            assert (patient["actor/skipped_steps"], patient["actor/optimizer_steps"]) == (4, 0), (
                layout
            )
            assert patient["moved"] == 0 and math.isnan(patient["actor/grad_norm"]), layout


@pytest.mark.parametrize("world", [4], indirect=True)
def test_bfloat16_stays_near(world: Any, root: Path) -> None:
    metrics = world[1][-1]["bfloat16"]
    experience = _experience(root, "llama")
    wanted = plain_ppo.evaluate(plain_ppo.load(root / "llama"), experience.rollout)[0]
    gap = (torch.tensor(metrics["logprobs"]) - wanted).abs()
    assert 1e-4 < gap.max() < 0.1 and gap[experience.rollout.response_mask].mean() < 0.02
    assert metrics["actor/kl_loss"] == 0.0 and math.isfinite(metrics["actor/grad_norm"])
