"""The place of each rank on the parallel axes of a role, in plain integers.

The ranks of a role form a grid. Ranks are numbered along its axes in the order of `AXES`, the first
one fastest, as in megatron-core. The experts of a mixture-of-experts model lie on the same ranks in
a grid of their own, `EXPERT_AXES`: within each pipeline stage the same ranks are numbered along
other axes. Nothing here touches a process group, so a laptop can compute a layout for ten thousand
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from mrlhf.errors import ConfigError
from mrlhf.parallel.stages import Stages

if TYPE_CHECKING:
    from mrlhf.config.sections import RoleSection

Axis = Literal["tp", "cp", "dp", "pp", "etp", "ep", "edp"]
AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
EXPERT_AXES: tuple[Axis, ...] = ("etp", "ep", "edp", "pp")
# Ranks that differ along these axes work on one share of a batch.
MODEL_AXES: tuple[Axis, ...] = ("tp", "cp", "pp")
# Ranks that differ along these axes hold the same weights, experts aside.
REPLICA_AXES: tuple[Axis, ...] = ("cp", "dp")
# Ranks that differ along these axes hold the same experts.
EXPERT_REPLICA_AXES: tuple[Axis, ...] = ("edp",)


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """The sizes that a role asks for; data parallelism takes the remaining ranks."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None  # of an expert; None for tp without expert parallelism, else for 1
    vpp: int = 1  # virtual stages of each pipeline rank, which take no ranks of their own
    pp_layers: tuple[int, ...] | None = None  # layers of each virtual stage; see `Stages`

    @classmethod
    def of(cls, section: RoleSection) -> AxisSizes:
        """The sizes of a role's section."""
        sizes = {field.name: section.value_of(field.name) for field in fields(cls)}
        if sizes["pp_layers"] is not None:
            sizes["pp_layers"] = tuple(sizes["pp_layers"])
        return cls(**sizes)

    @property
    def ranks(self) -> int:
        """The number of ranks that hold one copy of the model, or share a sequence."""
        return self.tp * self.cp * self.pp

    @property
    def expert_tp(self) -> int:
        """The tensor-parallel size of an expert."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1

    @property
    def shares_experts_across(self) -> bool:
        """Whether the experts of a layer lie on more ranks than a copy of the dense weights."""
        return self.tp * self.cp % (self.expert_tp * self.ep) != 0

    @property
    def smallest_world(self) -> int:
        """The fewest ranks on which the axes fit."""
        return self.pp * math.lcm(self.tp * self.cp, self.expert_tp * self.ep)

    def dp(self, world_size: int) -> int:
        """The data-parallel size on `world_size` ranks."""
        return world_size // self.ranks

    @property
    def stages(self) -> Stages:
        """The virtual stages of the pipeline."""
        return Stages(self.pp, self.vpp, self.pp_layers)

    def has_ranks_of(self, other: AxisSizes) -> bool:
        """Whether each rank has the same place as with the other sizes, layers aside."""
        mine = (self.tp, self.cp, self.pp, self.ep, self.expert_tp)
        return mine == (other.tp, other.cp, other.pp, other.ep, other.expert_tp)

    def problem(self, role: str, world_size: int) -> str | None:
        """Say in one line why the sizes do not fit `world_size` ranks; None if they do."""
        if world_size % self.ranks == 0:
            return self._expert_problem(role, world_size)
        keys = [f"{role}.{axis}" for axis in self._named]
        return (
            f"{role}: world size {world_size} is not divisible by {self.product(role='')}; start a "
            f"multiple of {self.ranks} processes or change {_one_of(keys)}"
        )

    def _expert_problem(self, role: str, world_size: int) -> str | None:
        """The reason why the experts do not fit the ranks of a pipeline stage; None if they do."""
        etp = self.expert_tp
        if self.tp % etp:
            fits = [str(size) for size in range(1, self.tp + 1) if self.tp % size == 0]
            return f"{role}.etp {etp} does not divide {role}.tp {self.tp}; use {_one_of(fits)}"

        ranks = world_size // self.pp
        if ranks % (etp * self.ep) == 0:
            return None
        fits = [str(size) for size in range(1, ranks + 1) if ranks % (etp * size) == 0]
        return (
            f"{role}.ep {self.ep} x {role}.etp {etp} = {self.ep * etp} does not divide the {ranks} "
            f"ranks of a pipeline stage; set {role}.ep to {_one_of(fits)}"
        )

    def product(self, role: str) -> str:
        """The sizes and their product, in words: "actor.tp 2 x actor.pp 2 = 4"."""
        prefix = f"{role}." if role else ""
        return f"{self._times(prefix)} = {self.ranks}"

    def __str__(self) -> str:
        dense = self._times("")
        if self.ep == 1 and self.expert_tp == self.tp:
            return dense
        return f"{dense} (experts ep {self.ep} x etp {self.expert_tp})"

    def _times(self, prefix: str) -> str:
        return " x ".join(f"{prefix}{axis} {getattr(self, axis)}" for axis in self._named)

    @property
    def _named(self) -> list[str]:
        """The axes that are spoken of: tp and pp, and others where they are used."""
        return [axis for axis in ("tp", "cp", "pp") if axis != "cp" or self.cp > 1]


@dataclass(frozen=True)
class Coordinates:
    """The position of one rank on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel axes of one role, as in `AxisSizes`."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    pp_layers: tuple[int, ...] | None = None
    dp: int = 1  # data-parallel size; tp x cp x pp x dp is the world size
    ep: int = 1  # the number of ranks that the experts of a layer are shared out over
    etp: int = 1  # tensor-parallel size of an expert

    def __post_init__(self) -> None:
        """Refuse experts that do not divide the ranks of a stage."""
        assert (self.tp * self.cp * self.dp) % (self.etp * self.ep) == 0, self

    @classmethod
    def for_world(cls, role: str, world_size: int, sizes: AxisSizes) -> ParallelLayout:
        """The layout of `role` on `world_size` ranks; ConfigError if its sizes do not divide it."""
        problem = sizes.problem(role, world_size)
        if problem is not None:
            raise ConfigError(problem)
        return cls(**{**vars(sizes), "dp": sizes.dp(world_size), "etp": sizes.expert_tp})

    @property
    def stages(self) -> Stages:
        """The virtual stages of the pipeline."""
        return Stages(self.pp, self.vpp, self.pp_layers)

    @property
    def stated(self) -> dict[str, int]:
        """The sizes that a checkpoint states: tp, pp and dp, and others that are above 1."""
        sizes = {axis: getattr(self, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")}
        if self.ep == 1 and self.etp == self.tp:
            del sizes["etp"]  # as dense layers are split
        return {
            axis: size for axis, size in sizes.items() if axis in ("tp", "pp", "dp") or size > 1
        }

    @property
    def edp(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group_size(*AXES)

    @property
    def first_copy(self) -> list[int]:
        """The ranks that together hold the first copy of the model, experts included."""
        in_stage = self.tp * self.cp * self.dp
        held = range(max(self.tp, self.etp * self.ep))
        return [stage * in_stage + rank for stage in range(self.pp) for rank in held]

    def size(self, axis: Axis) -> int:
        """Number of positions on `axis`."""
        return getattr(self, axis)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of global rank `rank`."""
        return Coordinates(**self._positions(rank, AXES), **self._positions(rank, EXPERT_AXES[:-1]))

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The global rank with these coordinates."""
        return self._rank({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, AXES)

    def place(self, rank: int, *axes: Axis) -> tuple[int, int]:
        """(number of the group, position in it) of global rank `rank` in `groups(*axes)`."""
        grid = _grid_of(axes)
        positions = self._positions(rank, grid)
        others = [axis for axis in grid if axis not in axes]
        own = [axis for axis in grid if axis in axes]
        return self._rank(positions, others), self._rank(positions, own)

    def rank_in(self, number: int, position: int, *axes: Axis) -> int:
        """The global rank at `position` of group `number` in `groups(*axes)`."""
        grid = _grid_of(axes)
        positions: dict[str, int] = {}
        for axis in grid:
            if axis in axes:
                position, positions[axis] = divmod(position, self.size(axis))
            else:
                number, positions[axis] = divmod(number, self.size(axis))
        return self._rank(positions, grid)

    def group_size(self, *axes: Axis) -> int:
        """Number of ranks in each list of `groups(*axes)`."""
        return math.prod(self.size(axis) for axis in axes)

    def groups(self, *axes: Axis) -> list[list[int]]:
        """The rank lists of the process groups whose ranks differ along `axes` only.

        The axes are those of one grid. Each list is ascending, and together the lists hold each
        rank once.
        """
        size = self.group_size(*axes)
        numbers = range(self.world_size // size)
        return [[self.rank_in(n, position, *axes) for position in range(size)] for n in numbers]

    def _positions(self, rank: int, grid: Sequence[Axis]) -> dict[str, int]:
        positions: dict[str, int] = {}
        for axis in grid:
            rank, positions[axis] = divmod(rank, self.size(axis))
        return positions

    def _rank(self, positions: Mapping[str, int], grid: Sequence[Axis]) -> int:
        """The number of the rank in a grid of these axes, the first one fastest."""
        rank = 0
        for axis in reversed(grid):
            rank = rank * self.size(axis) + positions[axis]
        return rank


def _grid_of(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The grid that has all these axes."""
    grid = AXES if set(axes) <= set(AXES) else EXPERT_AXES
    assert set(axes) <= set(grid), f"{axes} are of two grids"
    return grid


def _one_of(words: Sequence[str]) -> str:
    *others, last = words
    if not others:
        return last
    return f"{', '.join(others)} or {last}"
