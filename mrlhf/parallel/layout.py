"""Where each rank stands on the parallel axes of a role, in plain integers.

The ranks of a role form a grid. Ranks are numbered along its axes in the order of `AXES`, the first
one fastest, as in megatron-core. The experts of a mixture-of-experts model lie on the same ranks in
a grid of their own, `EXPERT_AXES`: within each pipeline stage the same ranks are numbered along
other axes. Nothing here touches a process group, so a laptop can compute a layout for ten thousand
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """The sizes that a role asks for; data parallelism takes what they leave.

    Attributes:
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline-parallel size.
        vpp: virtual stages of each pipeline rank, which take no ranks of their own.
        pp_layers: layers of each virtual stage; None: as many as `Stages` gives them.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    pp_layers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, section: RoleSection) -> AxisSizes:
        """Those of a role's section."""
        pp_layers = None if section.pp_layers is None else tuple(section.pp_layers)
        return cls(
            tp=section.tp,
            cp=section.cp,
            pp=section.pp,
            vpp=section.vpp,
            pp_layers=pp_layers,
        )

    @property
    def ranks(self) -> int:
        """How many ranks hold one copy of the model, or share a sequence."""
        return self.tp * self.cp * self.pp

    def dp(self, world_size: int) -> int:
        """The data-parallel size on so many ranks."""
        return world_size // self.ranks

    @property
    def stages(self) -> Stages:
        """The virtual stages of the pipeline."""
        return Stages(self.pp, self.vpp, self.pp_layers)

    def has_ranks_of(self, other: AxisSizes) -> bool:
        """Whether each rank has the same place as with the other sizes, layers aside."""
        return (self.tp, self.cp, self.pp) == (other.tp, other.cp, other.pp)

    def problem(self, role: str, world_size: int) -> str | None:
        """Why the sizes do not fit so many ranks, in one line; None if they do."""
        if world_size % self.ranks == 0:
            return None
        keys = [f"{role}.{axis}" for axis in self._named]
        return (
            f"{role}: world size {world_size} is not divisible by {self.product(role='')}; start a "
            f"multiple of {self.ranks} processes or change {_one_of(keys)}"
        )

    def product(self, role: str) -> str:
        """The sizes and their product, in words: "actor.tp 2 x actor.pp 2 = 4"."""
        prefix = f"{role}." if role else ""
        return f"{self._times(prefix)} = {self.ranks}"

    def __str__(self) -> str:
        return self._times("")

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

    def along(self, axis: Axis) -> int:
        """The position on `axis`."""
        position: int = getattr(self, axis)
        return position


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel axes of one role.

    Attributes:
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline-parallel size.
        vpp: virtual stages of each pipeline rank.
        pp_layers: layers of each virtual stage; None: as many as `Stages` gives them.
        dp: data-parallel size; tp x cp x pp x dp is the world size.
        ep: over how many ranks the experts of a layer are shared out.
        etp: tensor-parallel size of an expert.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    pp_layers: tuple[int, ...] | None = None
    dp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        """Refuse experts that do not divide the ranks of a stage."""
        assert (self.tp * self.cp * self.dp) % (self.etp * self.ep) == 0, self

    @classmethod
    def for_world(cls, role: str, world_size: int, sizes: AxisSizes) -> ParallelLayout:
        """The layout of `role` on `world_size` ranks.

        Raises:
            ConfigError: the sizes do not divide the world size.
        """
        problem = sizes.problem(role, world_size)
        if problem is not None:
            raise ConfigError(problem)
        return cls(
            tp=sizes.tp,
            cp=sizes.cp,
            pp=sizes.pp,
            vpp=sizes.vpp,
            pp_layers=sizes.pp_layers,
            dp=sizes.dp(world_size),
        )

    @property
    def stages(self) -> Stages:
        """The virtual stages of the pipeline."""
        return Stages(self.pp, self.vpp, self.pp_layers)

    @property
    def stated(self) -> dict[str, int]:
        """The sizes that a checkpoint states: tp, pp and dp, and others that are above 1."""
        sizes = {axis: getattr(self, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")}
        return {
            axis: size for axis, size in sizes.items() if axis in ("tp", "pp", "dp") or size > 1
        }

    @property
    def edp(self) -> int:
        """How many ranks hold the same experts."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group_size(*AXES)

    def size(self, axis: Axis) -> int:
        """Number of positions on `axis`."""
        size: int = getattr(self, axis)
        return size

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
        number = 0
        position = 0
        for axis in reversed(grid):
            if axis in axes:
                position = position * self.size(axis) + positions[axis]
            else:
                number = number * self.size(axis) + positions[axis]
        return number, position

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
    return f"{', '.join(others)} or {last}"


@dataclass(frozen=True)
class EngineLayout:
    """Which ranks form the inference replicas, `tp` ranks each.

    Each group of ranks of `actor` that differ along `axes` only is cut into replicas of
    consecutive ranks, so the replicas hold each rank once.

    Attributes:
        tp: tensor-parallel size of the engine.
        actor: the layout of the role whose ranks the replicas share.
        axes: the axes along which the ranks of a replica may differ.
    """

    tp: int
    actor: ParallelLayout
    axes: tuple[Axis, ...]

    @classmethod
    def inside(cls, actor: ParallelLayout, tp: int) -> EngineLayout:
        """Cut each model-parallel group of `actor` into replicas of `tp` consecutive ranks.

        Raises:
            ConfigError: tp does not divide the size of such a group.
        """
        sizes = AxisSizes(tp=actor.tp, cp=actor.cp, pp=actor.pp)
        if sizes.ranks % tp:
            raise ConfigError(
                f"rollout.tp {tp} does not divide {sizes.product('actor')}; choose a divisor of it"
            )
        return cls(tp, actor, MODEL_AXES)

    @classmethod
    def consecutive(cls, actor: ParallelLayout, tp: int) -> EngineLayout:
        """Cut the ranks of the job into replicas of `tp` consecutive ones, across actor groups.

        Raises:
            ConfigError: tp does not divide the world size.
        """
        world_size = actor.world_size
        if world_size % tp:
            raise ConfigError(
                f"rollout.tp {tp} does not divide the world size {world_size}; choose a divisor "
                "of it"
            )

        # Ranks that follow each other differ along the first axis first.
        if actor.group_size("tp", "cp") % tp == 0 or actor.dp == 1:
            return cls(tp, actor, MODEL_AXES)
        return cls(tp, actor, AXES)

    @property
    def is_inside(self) -> bool:
        """Whether each replica lies in one model-parallel group of the actor."""
        return self.axes == MODEL_AXES

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return self.actor.world_size // self.tp

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of each replica in tensor-parallel order."""
        places = range(self.tp)
        return tuple(
            tuple(self.rank_at(number, tp_rank) for tp_rank in places)
            for number in range(self.num_replicas)
        )

    def place(self, rank: int) -> tuple[int, int]:
        """(number of the replica, tensor-parallel rank in it) of global rank `rank`."""
        group, position = self.actor.place(rank, *self.axes)
        number, tp_rank = divmod(position, self.tp)
        return group * self._per_group + number, tp_rank

    def rank_at(self, replica: int, tp_rank: int) -> int:
        """The global rank that stands at `tp_rank` of replica number `replica`."""
        group, number = divmod(replica, self._per_group)
        return self.actor.rank_in(group, number * self.tp + tp_rank, *self.axes)

    @property
    def _per_group(self) -> int:
        return self.actor.group_size(*self.axes) // self.tp
