"""The contract of training: the same numbers on every layout, whatever is trained.

Each test is one combination of the axes in `invariance_axes`. In the few that `make test` runs,
every value occurs; with those of `make test-full`, of 4 ranks, and of `make test-recipes`, of 8,
every two values meet that go together.
Fine-tuning, reward model, critic and actor are trained, and their losses, all their other metrics,
their gradient norms and their updated weights are compared with plain loops in one process; so is
what actor, critic and reference say of the batch before that. A policy that is trained on
log-probabilities which it has just computed sees the ratio 1 exactly.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.covering import Row
from tests.dist.invariance_axes import AXES, LAYERS, few_rows, more_rows, name_of
from tests.dist.invariance_checks import PlainRuns, comparisons
from tests.dist.invariance_runs import RowResult, train_rows
from tests.dist.role_runs import save_inputs
from tests.ranks import run_ranks

FEW = few_rows()
MORE = more_rows(FEW)
ROWS = [*FEW, *MORE]


class Matrix:
    """Runs the rows of a tier and world size in one start of ranks, when one of them is asked for.

    Attributes:
        root: holds the models, the experiences, and the weights that the rows have trained.
        plain: what the rows must equal.
        ranks: takes a world size, and whether only the few rows; for each rank, results by row.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        save_inputs(root, LAYERS)
        self.plain = PlainRuns(root)
        self.ranks = cache(self._ranks)

    def _ranks(self, world_size: int, few: bool) -> list[dict[str, RowResult]]:
        rows = [row for row in (FEW if few else MORE) if row["ranks"] == world_size]
        return run_ranks(world_size, train_rows, str(self.root), rows)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """The trained rows."""
    return Matrix(tmp_path_factory.mktemp("invariance"))


LATER = {4: pytest.mark.full, 8: pytest.mark.recipes}


@pytest.mark.parametrize(
    "row", [*FEW, *(pytest.param(row, marks=LATER[row["ranks"]]) for row in MORE)], ids=name_of
)
def test_training_equals_plain_loops(matrix: Matrix, row: Row) -> None:
    name = name_of(row)
    ranks = [results[name] for results in matrix.ranks(row["ranks"], row in FEW)]
    for check in comparisons(ranks, matrix.plain, row, matrix.root).values():
        check()

    fresh = ranks[0].fresh
    assert (fresh["actor/ppo_kl"], fresh["actor/pg_clipfrac"]) == (0.0, 0.0), name
    assert fresh["actor/grad_norm"] > 0.01, name


def test_every_value_of_every_axis_is_run() -> None:
    for axis, values in AXES.items():
        assert {row[axis] for row in ROWS} == set(values), axis
        assert axis == "ranks" or {row[axis] for row in FEW} == set(values), axis
    assert len({name_of(row) for row in ROWS}) == len(ROWS)
