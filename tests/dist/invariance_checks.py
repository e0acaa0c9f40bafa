"""Compares a row of the invariance matrix with plain loops in one process. It starts no ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mrlhf.weights.shard import Key
from tests.covering import Row
from tests.dist.invariance_axes import name_of
from tests.dist.invariance_runs import (
    ROLES,
    RowResult,
    Trained,
    case_of,
    plain_ppo_roles,
    plain_supervised_roles,
)
from tests.dist.role_runs import assert_metrics, assert_near, assert_weights, load_experience
from tests.oracle.plain_models import critic_of, is_frozen
from tests.oracle.plain_optimizer import Outcome
from tests.oracle.plain_ppo import Case
from tests.oracle.plain_tables import all_tables

# Up to four steps of up to 1e-2. Gradients of four layers are rounded by up to 4e-6, so each step
# by up to 1e-2 * 4e-6 / EPS.
WEIGHTS_DIFFER = 1.6e-4


class PlainRuns:
    """What the plain loops compute of the models and experiences in `root`, each once.

    Attributes:
        root: holds them.
        tables: takes a model, and whether it has its adapter; what transformers says of the batch
            before training.
    """

    def __init__(self, root: Path) -> None:
        self.tables = cache(self._tables)
        self.root = root
        self._supervised: dict[str, dict[str, Outcome]] = {}
        self._ppo: dict[str, dict[str, Outcome]] = {}

    def roles(self, case: Case) -> dict[str, Outcome]:
        """What the plain loops train, by role."""
        # Of the policy's loss, the supervised trainings read no more than this.
        supervised = Case(
            case.model,
            "token-mean",
            clip_grad=case.clip_grad,
            router_losses=case.router_losses,
            lora=case.lora,
            optimizer=case.optimizer,
            freeze=case.freeze,
        )
        if str(supervised) not in self._supervised:
            self._supervised[str(supervised)] = plain_supervised_roles(self.root, supervised)
        if str(case) not in self._ppo:
            self._ppo[str(case)] = plain_ppo_roles(self.root, case)
        return self._supervised[str(supervised)] | self._ppo[str(case)]

    def _tables(self, model: str, adapted: bool) -> dict[str, Tensor]:
        rollout = load_experience(self.root, Case(model, "token-mean")).rollout
        return all_tables(self.root / model, rollout, adapted)


def comparisons(
    ranks: Sequence[RowResult], plain: PlainRuns, row: Row, out: Path
) -> dict[str, Callable[[], None]]:
    """What is compared, by its name; each function raises where numbers differ.

    Args:
        ranks: what each rank says of the row.
        plain: what it must equal.
        row: the row.
        out: where the row has left its weights.
    """
    name = name_of(row)
    wanted = plain.roles(case_of(row))
    tables = plain.tables(row["model"], row["lora"])
    checks: dict[str, Callable[[], None]] = {}
    checks["tables"] = partial(_assert_tables, ranks, tables, name)

    for role in ROLES:
        title = f"{name}: {role}"
        trained = [result.trained[role] for result in ranks]
        metrics = [rank.metrics for rank in trained]
        checks[f"{role} metrics"] = partial(assert_metrics, metrics, wanted[role].metrics, title)
        weights = wanted[role].weights
        checks[f"{role} weights"] = partial(
            assert_weights, out / name / role, weights, WEIGHTS_DIFFER, title
        )
        if row["freeze"]:
            model = row["model"] if role in ("sft", "actor") else critic_of(row["model"])
            places = (out / name / role, plain.root / model)
            checks[f"{role} frozen"] = partial(_assert_frozen, *places, title)
        checks[f"{role} replicas"] = partial(_assert_replicas, trained, title)

    return checks


def _assert_tables(ranks: Sequence[RowResult], wanted: dict[str, Tensor], name: str) -> None:
    for tables in [result.tables for result in ranks]:
        assert tables.keys() == wanted.keys()
        for key, table in wanted.items():
            assert_near(torch.tensor(tables[key]), table, atol=2e-5, title=f"{name}: {key}")


def _assert_frozen(trained: Path, start: Path, title: str) -> None:
    """What does not train is as it was in the file, bit for bit; all else has moved."""
    (before,), (after,) = (list(place.glob("*.safetensors")) for place in (start, trained))
    stored = load_file(before)
    for name, tensor in load_file(after).items():
        fixed = is_frozen(name) or name.endswith("correction_bias")
        assert torch.equal(tensor, stored[name]) == fixed, f"{title}: {name}"


def _assert_replicas(ranks: Sequence[Trained], title: str) -> None:
    """All ranks that hold a slice of a weight hold the same, bit for bit."""
    found: dict[Key, set[int]] = defaultdict(set)
    for rank in ranks:
        for key, digest in rank.digests.items():
            found[key].add(digest)
    assert not [key for key, digests in found.items() if len(digests) > 1], title
