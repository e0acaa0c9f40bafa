"""A run holds in each phase, byte for byte, what the plan says, and no more than it may."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from mrlhf.config import PPOConfig, load_config
from mrlhf.preflight.footprint import GENERATION, OWNERS, Footprint, footprint
from mrlhf.preflight.model_checks import check_models
from tests.e2e.programs import read_lines, run_commands, succeed
from tests.oracle import plain_models
from tests.simulation.job import simulate_alone
from tests.tiny_task import ppo_keys, write_tiny_task

RANKS = 2
EVERYTHING = list(OWNERS)
ROLES = ("actor", "critic", "reference")


@dataclass(frozen=True)
class Case:
    """A configuration in which all that can leave the device does, and its plan."""

    file: Path
    plan: Footprint
    output: Path

    @property
    def bound(self) -> str:
        """The key that leaves the models and the engine what the largest phase needs."""
        most = max(map(self.plan.total, self.plan.phases))
        return f"distributed.device_memory_mb={most / 2**20!r}"


# The phases of a run that train, and their names in a plan.
_PARTS = {f"update_{role}": f"update of {role}" for role in ("actor", "critic")}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("offload")
    torch.manual_seed(3)
    plain_models.save_models(root)
    write_tiny_task(root / "data")
    # Without the distributed optimizer no buffer is padded; the cache has room for one response.
    optim = {"lr": 1e-3, "use_distributed_optimizer": False}
    trained = {"ppo_mini_batch_size": 4, "offload": EVERYTHING, "optim": optim}
    keys = ppo_keys(root, trained)
    keys["reference"]["offload"] = ["params"]
    keys["rollout"] |= {"max_num_seqs": 1, "block_size": 16}
    for role in ROLES:
        keys[role]["dtype"] = "bfloat16"
    keys |= {
        "reward": {"terms": [{"name": "exact_match"}]},
        "algorithm": {"use_kl_in_reward": True},
        "teacher": {"weights": "earlier", "decay": 0.5, "offload": ["params"]},
        "trainer": {"total_steps": 2, "test_freq": 2, "output_dir": str(root / "run")},
    }
    file = root / "ppo.yaml"
    file.write_text(yaml.safe_dump(keys), encoding="utf-8")

    config = load_config(PPOConfig, str(file), [])
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    plan = footprint(config, specs, RANKS)
    for phase in plan.phases.values():  # nothing owns activations
        for owner in [owner for owner in phase if owner.endswith("activations")]:
            del phase[owner]
    return Case(file, plan, root / "run")


def _command(case: Case, *keys: str) -> list[str]:
    run = f"torchrun --nproc-per-node={RANKS} launch/train_ppo.py --config {case.file}"
    return [" ".join([run, *keys])]


def test_a_run_holds_what_the_plan_says(case: Case) -> None:
    succeed(run_commands(_command(case, case.bound)))
    plan = case.plan
    assert not plan.held
    params = {role: plan.sizes[f"{role}/params"] for role in ROLES}
    wanted = {
        "reshard": plan.total(GENERATION),
        "gen": plan.total(GENERATION),
        "ref": params["reference"],
        "teacher": plan.total("move of teacher"),
        "old_log_prob": params["actor"],
        "values": params["critic"],
        "adv": 0,
        **{phase: plan.total(name) for phase, name in _PARTS.items()},
    }

    in_loss = plan.sizes["teacher/params"]
    for row in read_lines(case.output / "metrics.jsonl")[1:]:
        # The first step makes moments at its end, when the teacher has left.
        late = {"update_actor": wanted["update_actor"] - in_loss} if row["step"] == 1 else {}
        for phase, nbytes in (wanted | late).items():
            assert math.isclose(row[f"perf/memory_in/{phase}"], nbytes / 1e9), phase
        owners = {name: row[name] for name in row if name.startswith("perf/memory/")}
        fullest = max(_PARTS.values(), key=plan.total)
        assert plan.total(fullest) > plan.total(GENERATION), "choose a smaller engine"
        assert owners == {
            f"perf/memory/{owner}": pytest.approx(nbytes / 1e9)
            for owner, nbytes in plan.phases[fullest].items()
        }


def test_simulated_ranks_hold_and_send_what_those_of_a_run_do(case: Case) -> None:
    config = load_config(PPOConfig, str(case.file), [])
    row = read_lines(case.output / "metrics.jsonl")[-1]
    phases = {name.rpartition("/")[2] for name in row if name.startswith("perf/memory_in/")}
    assert {"gen", "ref", "values", "update_actor", "update_critic"} <= phases
    sent = 0
    for rank in range(RANKS):
        one = simulate_alone(config, RANKS, per_machine=8, rank=rank)
        assert not one.error
        for phase in phases & one.held.keys() - {"step"}:
            held = sum(one.held[phase].values())
            assert math.isclose(row[f"perf/memory_in/{phase}"], held / 1e9), phase
        sent += sum(size for kind, size in one.nbytes.items() if kind.operation == "send")
    assert sent == row["reshard/bytes_moved"] > 0


def test_states_that_pass_through_in_parts_change_nothing(case: Case) -> None:
    streamed = case.output.with_name("streamed")
    keys = ("actor.optim.stream=host", "critic.optim.stream=disk", f"trainer.output_dir={streamed}")
    succeed(run_commands(_command(case, *keys)))
    model = "actor/model.safetensors"
    assert (streamed / model).read_bytes() == (case.output / model).read_bytes()

    rows, others = (read_lines(at / "metrics.jsonl") for at in (case.output, streamed))
    for row, other in zip(rows, others, strict=True):
        free = ("perf/", "timing", "reshard/seconds")
        assert {key: row[key] for key in row if not key.startswith(free)} == {
            key: other[key] for key in other if not key.startswith(free)
        }


def test_the_same_bound_refuses_models_that_stay(case: Case) -> None:
    stays = [f"{role}.offload=[]" for role in ROLES]
    ended = run_commands(_command(case, case.bound, "trainer.overwrite=true", *stays))
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if "device_memory_mb" in line]
    assert "is too little for the phase" in said[0]
    assert "Room is made by actor.offload=" in said[0]


def test_more_than_was_planned_ends_the_run(case: Case) -> None:
    """The bound has room for the plan, which has one response in the cache, and not for more."""
    keys = (case.bound, "trainer.overwrite=true", "rollout.max_num_seqs=64")
    ended = run_commands(_command(case, *keys))
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if "is too little for phase" in line]
    assert "device_memory_mb" in said[0]
    assert "phase start, which needs engine/cache" in said[0]
    assert "rollout.kv_cache_mb" in said[0]
