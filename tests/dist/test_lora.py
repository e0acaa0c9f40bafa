"""Adapters beside what other tests of layouts see: the reference that a policy is for itself, the
bytes that training takes, and adapters of routers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.model_bytes import training_bytes
from mrlhf.roles.actor import Actor
from mrlhf.roles.reference import Reference
from mrlhf.training.earlier_policy import EarlierPolicy
from tests.dist.role_runs import (
    SEQUENCE_PARALLEL,
    Form,
    Setting,
    build_actor,
    cut_responses,
    load_experience,
    save_inputs,
    update_actor,
)
from tests.oracle import plain_ppo, plain_tables
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

ADAPTED = Case("qwen3-moe", "token-mean", lora=True)
SIZES = {"tp 2": AxisSizes(tp=2), "dp 2": AxisSizes()}


def test_a_policy_is_its_own_reference_and_takes_the_bytes_foreseen(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=[ADAPTED.model])
    found = run_ranks(2, _check, str(tmp_path))

    foreseen = found[0]["bytes"]
    assert len(foreseen) == 12
    for name, (predicted, measured, tensors) in foreseen.items():
        # megatron-core pads each tensor of a buffer to 64 numbers, and a buffer's end.
        padding = 256 * tensors + 4096
        for owner in ("weights", "gradients", "optimizer"):
            assert predicted[owner] <= measured[owner] <= predicted[owner] + padding, (name, owner)
    for dtype in ("float32", "bfloat16"):
        few = foreseen[f"tp 2 {dtype} adapters"][1]
        all_weights = foreseen[f"tp 2 {dtype} all"][1]
        assert few["weights"] < 1.5 * all_weights["weights"]
        assert few["optimizer"] < 0.5 * all_weights["optimizer"]
        some = foreseen[f"tp 2 {dtype} some"][1]
        assert some["weights"] == all_weights["weights"]
        for owner in ("gradients", "optimizer"):
            assert some[owner] < 0.9 * all_weights[owner]


def _check(rank: int, world_size: int, root: str) -> dict[str, Any]:
    factory = GroupFactory(timeout_s=600.0)
    groups = {}
    for name, sizes in SIZES.items():
        groups[name] = factory.role_groups(ParallelLayout.for_world(name, world_size, sizes))
    _check_reference(Setting(Path(root), groups["tp 2"], SEQUENCE_PARALLEL))
    _check_earlier(Path(root), groups)

    found = {}
    for name in SIZES:
        for dtype in ("float32", "bfloat16"):
            whole = Case(ADAPTED.model, "token-mean")
            for case in (ADAPTED, whole, replace(whole, freeze=True)):
                form = Form(name, 1000, distributed_optimizer=True, dtype=dtype)
                setting = Setting(Path(root), groups[name], form)
                which = "adapters" if case.lora else "some" if case.freeze else "all"
                key = f"{name} {dtype} {which}"
                found[key] = _bytes(setting, case)
    return {"bytes": found}


def _check_reference(setting: Setting) -> None:
    """With its adapters off, or as they began, the policy gives what it is to give, to the bit."""
    experience = load_experience(setting.root, ADAPTED)
    rollout = experience.rollout
    policy = build_actor(setting, ADAPTED)
    base = build_actor(setting, Case(ADAPTED.model, "token-mean"))
    cut = cut_responses(policy, rollout)
    began = policy.engine.adapters.copy()

    def logprobs(actor: Actor) -> torch.Tensor:
        return actor.evaluate(rollout, cut).logprobs

    of_base = logprobs(base)
    of_start = logprobs(policy)
    update_actor(policy, experience, plain_ppo.MINI_BATCH)
    of_policy = logprobs(policy)
    assert not torch.equal(of_base, of_start) and not torch.equal(of_start, of_policy)

    engine = policy.engine
    without = Reference(engine, plain_tables.TEMPERATURE, engine.adapters.off)
    assert torch.equal(without.logprobs(rollout, cut), of_base)
    as_begun = Reference(engine, plain_tables.TEMPERATURE, lambda: engine.adapters.exchanged(began))
    own = engine.adapters.copy()
    copied: list[torch.Tensor] = []
    # The thread that writes a checkpoint has not read them yet.
    engine.optimizer.hold_until(lambda: copied.extend(engine.adapters.copy()))
    assert torch.equal(as_begun.logprobs(rollout, cut), of_start)
    assert torch.equal(logprobs(policy), of_policy)
    assert all(map(torch.equal, copied, own)) and len(copied) == len(own) > 0


def _check_earlier(root: Path, groups: dict[str, RoleGroups]) -> None:
    """A teacher that is an earlier policy moves as it should, and is stored for any layout."""
    policy = build_actor(Setting(root, groups["tp 2"], SEQUENCE_PARALLEL), ADAPTED)
    engine = policy.engine
    began = engine.adapters.copy()
    earlier = EarlierPolicy(engine, every=2, decay=0.25)
    update_actor(policy, load_experience(root, ADAPTED), plain_ppo.MINI_BATCH)
    now = engine.adapters.copy()
    earlier.after_step(2)
    for last in (False, True):
        with earlier.within():
            held = engine.adapters.copy()
        for values, before, after in zip(held, began, now, strict=True):
            share = 0.25**2 if last else 0.25
            torch.testing.assert_close(values, share * before + (1 - share) * after)
        earlier.after_step(3 if last else 4)
    assert all(map(torch.equal, engine.adapters.copy(), now))
    earlier.save(root / "earlier")

    form = Form("dp 2", 1000, distributed_optimizer=True)
    policy = build_actor(Setting(root, groups["dp 2"], form), ADAPTED)
    other = EarlierPolicy(policy.engine, every=1, decay=0.0)
    other.load(root / "earlier")
    other.save(root / "again")
    files = [next((root / name).iterdir()).read_bytes() for name in ("earlier", "again")]
    assert files[0] == files[1] and len(files[0]) > 1000
    other.load(root / "not there")  # it begins as the policy, which has not been trained
    other.save(root / "begun")
    assert next((root / "begun").iterdir()).read_bytes() != files[0]


def _bytes(setting: Setting, case: Case) -> tuple[dict[str, int], dict[str, int], int]:
    """What is foreseen for this rank's model in training, what it takes, and its tensors."""
    actor = build_actor(setting, case)
    update_actor(actor, load_experience(setting.root, case), plain_ppo.MINI_BATCH)
    engine = actor.engine
    predicted = training_bytes(
        engine.spec, setting.groups.layout, engine.dtype.itemsize, splits_optimizer=True
    )
    measured = dict(zip(vars(predicted), engine.residency.nbytes.values(), strict=True))
    return dict(vars(predicted)), measured, len(engine.trained_shapes)
