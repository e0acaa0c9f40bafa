"""The contract of training: the same numbers on every layout, whatever is trained.

Each test is one combination of the axes in `invariance_axes`, chosen so that every two values which
go together meet in one of them. Fine-tuning, reward model, critic and actor are trained, and their
losses, all their other metrics, their gradient norms and their updated weights are compared with
plain loops in one process; so is what actor, critic and reference say of the batch before that. A
policy that is trained on log-probabilities which it has just computed sees the ratio 1 exactly.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mrlhf.weights.shard import Key
from tests.covering import Row
from tests.dist.invariance_axes import AXES, LAYERS, matrix_rows, name_of
from tests.dist.invariance_runs import (
    ROLES,
    RowResult,
    case_of,
    plain_ppo_roles,
    plain_supervised_roles,
    train_rows,
)
from tests.dist.role_runs import assert_near, load_experience, save_inputs
from tests.plain_optimizer import Outcome
from tests.plain_ppo import Case
from tests.plain_tables import all_tables
from tests.ranks import run_ranks

ROWS = matrix_rows()
# These depend on the layout, and so do how long things take.
OF_THE_LAYOUT = ("train/", "perf/", "timing")


class Matrix:
    """Runs the rows of each world size in one start of ranks, when the first of them is asked for.

    Attributes:
        root: holds the models, the experiences, and the weights that the rows have trained.
        ranks: takes a world size; for each of its ranks, the results by row.
        tables: takes a model; what transformers says of the batch before training.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        save_inputs(root, LAYERS)
        self.ranks = cache(self._ranks)
        self.tables = cache(self._tables)
        self._supervised: dict[str, dict[str, Outcome]] = {}
        self._ppo: dict[str, dict[str, Outcome]] = {}

    def plain(self, case: Case) -> dict[str, Outcome]:
        """What the plain loops train, by role."""
        # No policy loss reaches the first two.
        supervised = Case(
            case.model, "token-mean", clip_grad=case.clip_grad, router_losses=case.router_losses
        )
        if str(supervised) not in self._supervised:
            self._supervised[str(supervised)] = plain_supervised_roles(self.root, supervised)
        if str(case) not in self._ppo:
            self._ppo[str(case)] = plain_ppo_roles(self.root, case)
        return self._supervised[str(supervised)] | self._ppo[str(case)]

    def _ranks(self, world_size: int) -> list[dict[str, RowResult]]:
        rows = [row for row in ROWS if row["ranks"] == world_size]
        return run_ranks(world_size, train_rows, str(self.root), rows)

    def _tables(self, model: str) -> dict[str, Tensor]:
        rollout = load_experience(self.root, Case(model, "token-mean")).rollout
        return all_tables(self.root / model, rollout)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """The trained rows."""
    return Matrix(tmp_path_factory.mktemp("invariance"))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_training_equals_plain_loops(matrix: Matrix, row: Row) -> None:
    name = name_of(row)
    ranks = [results[name] for results in matrix.ranks(row["ranks"])]
    for result in ranks:
        _assert_tables(result.tables, matrix.tables(row["model"]), name)

    plain = matrix.plain(case_of(row))
    for role in ROLES:
        title = f"{name}: {role}"
        trained = [result.trained[role] for result in ranks]
        _assert_metrics([each.metrics for each in trained], plain[role], title)
        _assert_weights(matrix.root / name / role, plain[role], title)
        _assert_replicas([each.digests for each in trained], title)

    fresh = ranks[0].fresh
    assert (fresh["actor/ppo_kl"], fresh["actor/pg_clipfrac"]) == (0.0, 0.0), name
    assert fresh["actor/grad_norm"] > 0.01, name


def _assert_tables(
    tables: dict[str, list[list[float]]], wanted: dict[str, Tensor], name: str
) -> None:
    assert tables.keys() == wanted.keys()
    for key, table in wanted.items():
        assert_near(torch.tensor(tables[key]), table, atol=2e-5, title=f"{name}: {key}")


def _assert_metrics(ranks: list[dict[str, float]], outcome: Outcome, title: str) -> None:
    metrics = {k: v for k, v in ranks[0].items() if not k.startswith(OF_THE_LAYOUT)}
    assert metrics.keys() == outcome.metrics.keys(), title
    for name, value in outcome.metrics.items():
        assert metrics[name] == pytest.approx(value, rel=5e-5, abs=1e-5), f"{title}: {name}"
        assert all(rank[name] == metrics[name] for rank in ranks), f"{title}: {name} by rank"


def _assert_weights(directory: Path, outcome: Outcome, title: str) -> None:
    weights = load_file(directory / "model.safetensors")
    assert weights.keys() == outcome.weights.keys(), title
    for name, tensor in weights.items():
        # Up to four steps of up to 1e-2. Gradients of four layers are rounded by up to 4e-6, so
        # each step by up to 1e-2 * 4e-6 / EPS.
        assert_near(tensor, outcome.weights[name], atol=1.6e-4, title=f"{title}: {name}")


def _assert_replicas(ranks: list[dict[Key, int]], title: str) -> None:
    """All ranks that hold a slice of a weight hold the same, bit for bit."""
    found: dict[Key, set[int]] = defaultdict(set)
    for digests in ranks:
        for key, digest in digests.items():
            found[key].add(digest)
    assert not [key for key, digests in found.items() if len(digests) > 1], title


def test_every_value_of_every_axis_is_run() -> None:
    for axis, values in AXES.items():
        assert {row[axis] for row in ROWS} == set(values), axis
    assert len({name_of(row) for row in ROWS}) == len(ROWS)
