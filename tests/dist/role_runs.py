"""Builds and trains single roles in a rank, for the tests that compare them with the plain loop.

A `Form` says how a role is run, which must not change what it computes. Every call into the roles
stands in this file, which starts no ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.critic import CriticSection, ScalarOptimSection
from mrlhf.config.sections import (
    ActorOptimSection,
    ActorSection,
    LoraSection,
    OptimSection,
    PolicyLossSection,
    ReferenceSection,
    TrainedModelSection,
)
from mrlhf.config.teacher import DistillationSection, TeacherSection
from mrlhf.device import Device
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.models.spec import Head
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.rl.correction import Correction, Criterion
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.roles.reference import Reference, Teacher
from mrlhf.roles.token_logprobs import ReferenceStates
from mrlhf.training.engine import ModelEngine
from tests.oracle import (
    plain_experience,
    plain_losses,
    plain_models,
    plain_optimizer,
    plain_ppo,
    plain_routers,
    plain_tables,
)
from tests.oracle.plain_lora import adapter_of
from tests.oracle.plain_ppo import Case

Optim = TypeVar("Optim", bound=OptimSection)

CPU = Device("cpu", torch.device("cpu"))
LAYOUTS = {
    1: [AxisSizes()],
    2: [AxisSizes(tp=2)],
    4: [AxisSizes(tp=2, pp=2), AxisSizes(tp=2), AxisSizes(cp=2)],
}
"""By world size; `test_invariance` runs all others."""
STAGED = AxisSizes(tp=2, pp=2, vpp=2)
"""Virtual stages, for the models of four layers."""
OF_THE_LAYOUT = ("train/", "perf/", "timing")
"""How metrics begin that depend on the layout, and those of how long things take."""

_COVARIANCE = PolicyLossSection(
    clip_cov_ratio=plain_losses.COV_FRACTION,
    clip_cov_lb=plain_losses.COV_BOUNDS[0],
    clip_cov_ub=plain_losses.COV_BOUNDS[1],
    kl_cov_ratio=plain_losses.COV_FRACTION,
    ppo_kl_coef=plain_losses.PPO_KL_COEF,
)
_BAND = Criterion("seq_mean_k1", 1 / plain_losses.BAND, plain_losses.BAND)
_BYPASS = {
    "token": Correction("token", None, plain_losses.THRESHOLD, normalise=False, criteria=()),
    "reinforce": Correction("token", None, plain_losses.THRESHOLD, normalise=True, criteria=()),
    "sequence": Correction("sequence", None, plain_losses.THRESHOLD, normalise=False, criteria=()),
    "geo": Correction(None, None, 1.0, normalise=False, criteria=(_BAND,)),
}


@dataclass(frozen=True)
class Form:
    """How a role is run, which must not change a number.

    `keys` and `optim` are more keys of the role's section and of its optimizer's.
    """

    name: str
    micro_batch_tokens: int
    distributed_optimizer: bool
    sequence_parallel: bool = False
    recompute: str = "none"
    dtype: str = "float32"
    keys: dict[str, Any] = field(default_factory=dict, compare=False)
    optim: dict[str, Any] = field(default_factory=dict, compare=False)


# 12 tokens are the longest sequence; all sequences of a mini-batch fit into 1000.
MANY_PACKS = Form("many packs", 12, distributed_optimizer=True)
ONE_PACK = Form("one pack", 1000, distributed_optimizer=False)
SEQUENCE_PARALLEL = Form(
    "sequence-parallel",
    20,
    distributed_optimizer=True,
    sequence_parallel=True,
    recompute="full",
)


@dataclass(frozen=True)
class Setting:
    """Where and how roles are built in this rank."""

    root: Path  # holds the models and the experiences, as `save_inputs` writes them
    groups: RoleGroups  # the process groups of the layout
    form: Form  # how the roles are run
    device: Device = CPU  # where they are run

    @property
    def layout(self) -> tuple[int, AxisSizes]:
        """World size, and the sizes that the role asks for."""
        layout = self.groups.layout
        return layout.world_size, AxisSizes(tp=layout.tp, cp=layout.cp, pp=layout.pp)

    @property
    def name(self) -> str:
        """Layout and form in words."""
        layout = self.groups.layout
        experts = "" if layout.ep == 1 else f" ep{layout.ep} etp{layout.etp}"
        stages = ""
        if self.is_staged:
            stages = f" vpp{layout.vpp} layers {'-'.join(map(str, layout.pp_layers or ()))}"
        sizes = f"tp{layout.tp} cp{layout.cp} pp{layout.pp} dp{layout.dp}"
        return f"{sizes}{stages}{experts} {self.form.name}"

    @property
    def is_staged(self) -> bool:
        """Whether it has four stages or names their layers, as only models of four layers can."""
        layout = self.groups.layout
        return layout.stages.count == 4 or layout.pp_layers is not None


def save_inputs(root: Path, layers: int = 2, models: Sequence[str] = plain_models.MODELS) -> None:
    """Write all models, of so many layers, and an experience for each of `models`."""
    plain_models.save_models(root, layers)
    for model, contexts in itertools.product(models, (False, True)):
        experience = plain_experience.make_experience(root / model, contexts)
        torch.save(experience, _experience_file(root, model, contexts))


def load_experience(root: Path, case: Case) -> Experience:
    """The experience of the case's model, corrected, broken, truncated, with holes, as it says."""
    has = (case.contexts, case.corrected, case.broken, case.holes, case.truncated, case.centred)
    return _experience(root, case.model, *has)


@cache
def _experience(
    root: Path,
    model: str,
    contexts: bool,
    corrected: bool,
    broken: bool,
    holes: bool,
    truncated: bool,
    centred: bool,
) -> Experience:
    experience: Experience = torch.load(_experience_file(root, model, contexts), weights_only=False)
    if corrected:
        experience = plain_experience.with_correction(experience)
    if broken:
        experience = plain_experience.broken(experience)
    if holes:
        experience = plain_experience.with_holes(experience)
    if truncated:
        experience = plain_experience.with_masks(experience, root / model)
    if centred:
        experience = plain_experience.with_heads(experience, root / model)
    return experience


def _experience_file(root: Path, model: str, contexts: bool) -> Path:
    return root / f"{model}{'.contexts' * contexts}.experience"


def settings(
    root: Path,
    world_size: int,
    forms: Sequence[Form],
    layouts: Mapping[int, Sequence[AxisSizes]] = LAYOUTS,
) -> Iterator[Setting]:
    """All layouts of the world size, each with the forms that it allows."""
    factory = GroupFactory(timeout_s=600.0)
    for sizes in layouts.get(world_size, ()):
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, sizes))
        for form in forms:
            if sizes.tp > 1 or not form.sequence_parallel:
                yield Setting(root, groups, form)


def cut_responses(
    role: Actor | Critic | Reference, rollout: Rollout, mini_batch_rows: int | None = None
) -> BatchCut:
    """The cut of the rollout for the role's model."""
    return role.engine.cut(rollout.sequences(), "response", mini_batch_rows)


def train(setting: Setting, case: Case, out: Path) -> dict[str, float]:
    """Update actor and critic from the same experience.

    Returns:
        Their metrics. Their weights go to `out`.
    """
    actor, metrics = train_actor(setting, case)
    actor.engine.export(out / "actor", 10**9)
    if case.has_critic:
        critic, of_critic = train_critic(setting, case)
        critic.export(out / "critic", 10**9)
        metrics |= of_critic
    return metrics


def train_actor(setting: Setting, case: Case) -> tuple[Actor, dict[str, float]]:
    """Update the case's policy; it, and the metrics."""
    experience = load_experience(setting.root, case)
    actor = build_actor(setting, case)
    cut = cut_responses(actor, experience.rollout, plain_ppo.MINI_BATCH)
    update = actor.update(experience, cut, reference_states(setting, case, cut))
    if update.first_pass is not None:
        assert torch.equal(update.first_pass.evaluated, experience.rollout.loss_mask)
    return actor, update.metrics


def reference_states(setting: Setting, case: Case, cut: BatchCut) -> list[ReferenceStates] | None:
    """What the case's loss needs of the reference."""
    return build_reference(setting, case).states(cut) if case.has_full_kl else None


def train_critic(setting: Setting, case: Case) -> tuple[ModelEngine, dict[str, float]]:
    """Update the case's critic; the trained model, and the metrics."""
    experience = load_experience(setting.root, case)
    critic = build_critic(setting, case)
    cut = cut_responses(critic, experience.rollout, plain_ppo.MINI_BATCH)
    return critic.engine, critic.update(experience, cut)


def evaluate(setting: Setting, case: Case) -> dict[str, Tensor]:
    """What `tables_of` the roles says, of new ones."""
    return tables_of(
        build_actor(setting, case),
        build_critic(setting, case),
        build_reference(setting, case),
        load_experience(setting.root, case).rollout,
    )


def tables_of(
    actor: Actor, critic: Critic, reference: Reference, rollout: Rollout
) -> dict[str, Tensor]:
    """All tables [batch, response_len] that the roles compute without training."""
    cut = cut_responses(actor, rollout, plain_ppo.MINI_BATCH)
    evaluation = actor.evaluate(rollout, cut, reference.states(cut), with_squares=True)
    assert evaluation.full_kl is not None and evaluation.sum_of_squares is not None
    return {
        "logprobs": evaluation.logprobs,
        "entropy": evaluation.entropy,
        "full_kl": evaluation.full_kl,
        "sum_of_squares": evaluation.sum_of_squares,
        "ref_logprobs": reference.logprobs(rollout, cut_responses(reference, rollout)),
        "values": critic.values(rollout, cut_responses(critic, rollout, plain_ppo.MINI_BATCH)),
    }


def build_actor(setting: Setting, case: Case, **keys: Any) -> Actor:
    """The case's policy, ready to be trained; `keys` of the section replace those of the case."""
    values: dict[str, Any] = {
        "path": str(setting.root / case.model),
        "ppo_epochs": plain_ppo.EPOCHS,
        "clip_ratio_low": plain_losses.CLIP_LOW,
        "clip_ratio_high": plain_losses.CLIP_HIGH,
        "clip_ratio_c": plain_losses.CLIP_C,
        "tau_pos": plain_losses.TAU_POS,
        "tau_neg": plain_losses.TAU_NEG,
        "policy_loss": _COVARIANCE,
        "loss_agg_mode": case.agg,
        "loss_scale_factor": plain_ppo.SCALE,
        "optim": actor_optim(setting, case),
    }
    values |= _form_keys(setting) | _router_keys(case) | case.settings | keys
    values |= _trained_keys(setting, case, case.model)
    section = ActorSection(**values)
    bypass = None if case.bypass is None else _BYPASS[case.bypass]
    loss = PolicyLossSettings.named(case.loss, section, bypass)
    loss = replace(loss, centres=case.centred)
    if case.teacher:
        loss = loss.distilling(DistillationSection(**case.teacher), plain_tables.TEMPERATURE)

    engine = _build_engine(setting, section, "lm")
    engine.attach_optimizer(section.optim, total_updates=1)
    return Actor(engine, loss, plain_tables.TEMPERATURE)


def actor_optim(setting: Setting, case: Case) -> ActorOptimSection:
    """The optimizer of the plain loop."""
    return _optim(ActorOptimSection, setting, case)


def logprobs_of(actor: Actor, rollout: Rollout, mini_batch_rows: int) -> Tensor:
    """The actor's log-probs of the responses, [batch, response_len]."""
    return actor.evaluate(rollout, cut_responses(actor, rollout, mini_batch_rows)).logprobs


def update_actor(actor: Actor, experience: Experience, mini_batch_rows: int) -> dict[str, float]:
    """Train the actor, and return the metrics."""
    cut = cut_responses(actor, experience.rollout, mini_batch_rows)
    return actor.update(experience, cut).metrics


def fingerprint(role: Actor | Critic | None) -> list[float]:
    """Numbers that change when a weight of this rank changes."""
    slots = [] if role is None else role.engine.slots
    return [slot.parameter.double().sum().item() for slot in slots]


def assert_near(value: Tensor, wanted: Tensor, atol: float, title: str) -> None:
    """No element differs by more than `atol`."""
    torch.testing.assert_close(
        value, wanted, rtol=0, atol=atol, msg=lambda message: f"{title}: {message}"
    )


def assert_weights(directory: Path, wanted: Mapping[str, Tensor], atol: float, title: str) -> None:
    """The only file of weights, of a model or of an adapter, has those that are wanted."""
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    assert weights.keys() == wanted.keys(), title
    for name, tensor in weights.items():
        assert_near(tensor.float(), wanted[name], atol=atol, title=f"{title}: {name}")


def assert_metrics(
    ranks: Sequence[Mapping[str, float]],
    wanted: Mapping[str, float],
    title: str,
    free: tuple[str, ...] = OF_THE_LAYOUT,
) -> None:
    """Every rank has the same metrics, near those that are wanted, but for the free ones."""
    metrics = {name: value for name, value in ranks[0].items() if not name.startswith(free)}
    assert metrics.keys() == wanted.keys(), title
    for name, value in wanted.items():
        difference = abs(metrics[name] - value)
        told = f"{title}: {name} {metrics[name]} where {value} is wanted"
        assert difference <= max(5e-5 * abs(value), 1e-5), told
        assert all(rank[name] == metrics[name] for rank in ranks), f"{title}: {name} by rank"


def build_critic(setting: Setting, case: Case) -> Critic:
    """The case's critic, ready to be trained."""
    section = CriticSection(
        path=str(setting.root / plain_models.critic_of(case.model)),
        ppo_epochs=plain_ppo.EPOCHS,
        cliprange_value=plain_ppo.CLIP_VALUE,
        loss_agg_mode=case.agg,
        loss_scale_factor=plain_ppo.SCALE,
        optim=_optim(ScalarOptimSection, setting, case),
        **_form_keys(setting),
        **_router_keys(case),
        **_trained_keys(setting, case, plain_models.critic_of(case.model)),
    )
    engine = _build_engine(setting, section, "scalar")
    engine.attach_optimizer(section.optim, total_updates=1)
    return Critic(engine, section)


def build_supervised(setting: Setting, case: Case, name: str, head: Head) -> ModelEngine:
    """The checkpoint `name`, ready to be trained with another loss than those of roles."""
    path = str(setting.root / name)
    keys = _form_keys(setting) | _router_keys(case) | _trained_keys(setting, case, name)
    section = TrainedModelSection(path=path, **keys)
    engine = _build_engine(setting, section, head)
    engine.attach_optimizer(_optim(OptimSection, setting, case), total_updates=2)
    return engine


def build_reference(setting: Setting, case: Case) -> Reference:
    """What the policy of the case is compared with."""
    path = str(setting.root / f"{case.model}-ref")
    keys = _form_keys(setting)
    if keys.get("offload"):
        keys["offload"] = ["params"]
    section = ReferenceSection(path=path, **keys)
    return Reference(_build_engine(setting, section, "lm"), plain_tables.TEMPERATURE)


def build_teacher(setting: Setting, case: Case, groups: RoleGroups, student: Actor) -> Teacher:
    """A teacher in a layout of its own, with the weights of the case's reference."""
    section = TeacherSection(
        path=str(setting.root / f"{case.model}-ref"),
        tp=groups.layout.tp,
        pp=groups.layout.pp,
        micro_batch_tokens=40,
        offload=["params"],
    )
    engine = _build_engine(replace(setting, groups=groups), section, "lm")
    return Teacher(engine, plain_tables.TEMPERATURE, student.engine)


def _optim(make: type[Optim], setting: Setting, case: Case) -> Optim:
    beta1, beta2 = plain_optimizer.BETAS
    keys: dict[str, Any] = {
        "name": case.optimizer,
        "lr": plain_optimizer.LR,
        "weight_decay": plain_optimizer.WEIGHT_DECAY,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": plain_optimizer.EPS,
        "clip_grad": case.clip_grad,
        "use_distributed_optimizer": setting.form.distributed_optimizer,
    }
    return make(**(keys | setting.form.optim))


def _build_engine(setting: Setting, section: Any, head: Head) -> ModelEngine:
    spec = spec_of_role(section, head)
    engine = ModelEngine(section, spec, setting.groups, setting.device)
    engine.load(section.path, seed=0)
    return engine


def _router_keys(case: Case) -> dict[str, float]:
    if not case.router_losses:
        return {}
    return {"router_balance_coef": plain_routers.BALANCE, "router_z_coef": plain_routers.Z}


def _trained_keys(setting: Setting, case: Case, model: str) -> dict[str, Any]:
    if case.freeze:
        return {"freeze": list(plain_models.FROZEN)}
    if not case.lora:
        return {}
    return {"lora": LoraSection(path=str(adapter_of(setting.root / model)))}


def _form_keys(setting: Setting) -> dict[str, Any]:
    layout = setting.groups.layout
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "pp": layout.pp,
        "ep": layout.ep,
        "etp": layout.etp,
        "vpp": layout.vpp,
        "pp_layers": None if layout.pp_layers is None else list(layout.pp_layers),
        "sequence_parallel": setting.form.sequence_parallel,
        "recompute": setting.form.recompute,
        "dtype": setting.form.dtype,
        "micro_batch_tokens": setting.form.micro_batch_tokens,
        **setting.form.keys,
    }
