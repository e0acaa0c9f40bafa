"""A teacher that is the actor of an earlier step, as a second model: its weights are those of an
average by hand, its distributions those of transformers, and it is stored for any layout.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.phases import Phases
from mrlhf.roles.actor import Actor
from mrlhf.roles.reference import Teacher, Teachers
from mrlhf.training.earlier_policy import EarlierPolicy
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import (
    Form,
    Setting,
    build_actor,
    cut_responses,
    load_experience,
    save_inputs,
)
from tests.models.checkpoints import read_tensors
from tests.oracle import plain_models, plain_tables
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

STEPS = 4
IN_LOSS = {"kl": "forward", "coef": 0.5}
EVERYTHING = {"offload": ["params", "grads", "optimizer"]}
SIZES = {"tp 2": AxisSizes(tp=2), "pp 2": AxisSizes(pp=2), "unsplit": AxisSizes()}


@dataclass(frozen=True)
class Run:
    """A policy that its earlier self teaches."""

    layout: str
    case: Case
    form: Form
    every: int = 1
    decay: float = 0.0

    @property
    def atol(self) -> float:
        """How far logarithms may be from those of float32."""
        return 2e-5 if self.form.dtype == "float32" else 0.3


def _case(model: str, optimizer: str = "adamw") -> Case:
    once = {"ppo_epochs": 1}
    return Case(model, "token-mean", settings=once, optimizer=optimizer, teacher=IN_LOSS)


OFFLOADED = Form(
    "offloaded", 40, True, dtype="bfloat16", keys=EVERYTHING, optim={"stream": "host", "lr": 1e-3}
)
RUNS = {
    "average": Run("tp 2", _case("qwen2-tied"), Form("shards", 40, True), every=2, decay=0.7),
    "offloaded": Run("pp 2", _case("qwen2-tied"), OFFLOADED, decay=0.75),
    "bfloat16": Run("tp 2", _case("llama"), Form("rounded", 40, True, dtype="bfloat16"), every=3),
    "experts": Run("unsplit", _case("qwen3-moe", "muon"), Form("muon", 40, False), decay=0.5),
}
OTHER = {"average": "pp 2", "offloaded": "tp 2", "bfloat16": "unsplit", "experts": "tp 2"}
"""The layout in which what was saved is read."""


def test_the_teacher_is_what_an_average_by_hand_is(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=list({run.case.model for run in RUNS.values()}))
    run_ranks(2, _check, str(tmp_path))


def _check(rank: int, world_size: int, root: str) -> None:
    factory = GroupFactory(timeout_s=600.0)
    groups = {}
    for name, sizes in SIZES.items():
        groups[name] = factory.role_groups(ParallelLayout.for_world(name, world_size, sizes))
    for name, run in RUNS.items():
        place = Path(root) / name
        _check_run(Path(root), place, run, groups[run.layout], rank)
        _check_stored(Path(root), place, run, groups[OTHER[name]])


def _check_run(root: Path, place: Path, run: Run, groups: RoleGroups, rank: int) -> None:
    """Each step has the divergence from the average of the policies before it."""
    experience = load_experience(root, run.case)
    rollout = experience.rollout
    actor, earlier, phases = _build(root, run, groups)
    engine = earlier.engine
    teacher = Teacher(engine, plain_tables.TEMPERATURE, None, earlier.within)
    cut = cut_responses(actor, rollout)
    asked = cut.packs if groups.is_last_stage else []

    weights = _weights(actor, place / "policy 0")
    wanted = weights
    held = [_held(phases, "params")]
    for number in range(1, STEPS + 1):
        policy = _as_plain(root, run, weights, place / f"policy {number} {rank}")
        plain = _as_plain(root, run, wanted, place / f"teacher {number} {rank}")
        sources = rollout.prompts.data_source
        states = Teachers({"": teacher}, {}).states_for(sources, rollout.sequences(), asked)
        logprobs = teacher.logprobs(rollout, engine.cut(rollout.sequences(), "response"))
        torch.testing.assert_close(
            logprobs, plain_tables.evaluate(plain, rollout)[0], rtol=0, atol=run.atol
        )
        metrics = actor.update(experience, cut, states).metrics
        divergence = metrics["actor/distillation_kl"]
        assert abs(divergence - _divergence(policy, plain, rollout)) < run.atol / 10, number
        has_become = run.decay == 0 and (number - 1) % run.every == 0
        assert (divergence < 1e-6) == (number == 1 or has_become)

        before = wanted
        weights = _weights(actor, place / f"policy {number}")
        if number % run.every == 0:
            wanted = {
                name: run.decay * value + (1 - run.decay) * weights[name]
                for name, value in wanted.items()
            }
        earlier.after_step(number)
        earlier.save(place / f"saved {number}")
        held.append(_held(phases, "params") + _held(phases, "optimizer"))
        _assert_same(read_tensors(place / f"saved {number}"), wanted, exact=run.decay == 0)
        assert any(not torch.equal(wanted[name], before[name]) for name in before) == (
            number % run.every == 0
        )
    assert any(held) != bool(run.form.keys)


def _check_stored(root: Path, place: Path, run: Run, groups: RoleGroups) -> None:
    """What was saved is read in another layout, to the bit, and the model computes with it."""
    actor, earlier, _ = _build(root, run, groups)
    begun = place / "begun"
    earlier.save(begun)
    saved = place / f"saved {STEPS}"
    earlier.load(saved)
    earlier.save(place / "again")
    again = read_tensors(place / "again")
    _assert_same(again, read_tensors(saved), exact=True)
    shown = _weights(earlier.engine, place / "shown")
    rounded = {name: value.to(earlier.engine.dtype).float() for name, value in again.items()}
    _assert_same(shown, rounded, exact=True)
    earlier.load(place / "not there")  # it begins as the policy, which has not been trained
    earlier.save(place / "afresh")
    _assert_same(read_tensors(place / "afresh"), read_tensors(begun), exact=True)
    _assert_same(read_tensors(begun), _weights(actor, place / "untrained"), exact=True)


def _build(root: Path, run: Run, groups: RoleGroups) -> tuple[Actor, EarlierPolicy, Phases]:
    setting = Setting(root, groups, run.form)
    actor = build_actor(setting, run.case)
    own = actor.engine
    offload = ["params", "optimizer"] if run.form.keys else []
    section = own._section.model_copy(update={"offload": offload})
    phases = Phases()
    spec = spec_of_role(section, "lm")
    model = ModelEngine(section, spec, groups, setting.device, phases, "teacher")
    return actor, EarlierPolicy(own, run.every, run.decay, model), phases


def _held(phases: Phases, owner: str) -> int:
    """The bytes of the teacher that are on the device."""
    return phases.memory.held.get(f"teacher/{owner}", 0)


def _weights(model: Actor | ModelEngine, place: Path) -> dict[str, Tensor]:
    """All weights, as they are exported, in float32."""
    engine = model.engine if isinstance(model, Actor) else model
    engine.export(place, 10**9)
    dist.barrier()  # the ranks of one copy write it
    return {name: tensor.float() for name, tensor in read_tensors(place).items()}


def _as_plain(root: Path, run: Run, weights: dict[str, Tensor], place: Path) -> object:
    """The model of transformers with these weights."""
    place.mkdir()
    shutil.copy(root / run.case.model / "config.json", place)
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return plain_models.load(place)


def _divergence(policy: object, teacher: object, rollout: Rollout) -> float:
    """The mean of KL(teacher, policy) over the tokens that train."""
    rows = []
    with torch.no_grad():
        for row, length in enumerate(rollout.response_lengths):
            log_p = plain_tables.distribution(policy, rollout, row)
            log_q = plain_tables.distribution(teacher, rollout, row)
            rows.append(plain_tables.kl_between(log_q, log_p)[rollout.loss_mask[row, :length]])
    return torch.cat(rows).mean().item()


def _assert_same(tensors: dict[str, Tensor], wanted: dict[str, Tensor], exact: bool) -> None:
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        if exact:
            assert torch.equal(tensor.float(), wanted[name].float()), name
        else:
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-7)
