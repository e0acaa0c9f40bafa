"""AdamW or Muon over one sharded model: megatron-core's optimizer and its schedule.

Steps with a gradient that cannot be used are skipped. This file knows parameters and gradients. It
does not know what loss the gradients come from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as optimizers
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mrlhf.config.critic import ScalarOptimSection
from mrlhf.config.sections import OptimizerName, OptimSection
from mrlhf.errors import TrainingError
from mrlhf.models.megatron_versions import grads_for_norm
from mrlhf.models.parameters import is_hidden_matrix
from mrlhf.models.transformer_engine import HAVE_TE, linears_of
from mrlhf.parallel.groups import RoleGroups
from mrlhf.training.data_parallel import WeightGather, overlaps, splits_optimizer
from mrlhf.training.muon import Holders, Muon, stepping
from mrlhf.training.optimizer_states import MOMENTS, mains, make_moments, parts, states_of
from mrlhf.training.residency import Residency
from mrlhf.weights.shard import Slot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of one optimizer step."""

    grad_norm: float  # of the whole gradient before clipping
    taken: bool  # whether the weights were updated; False if the gradient could not be used


# Matches the name of a scalar head's weight.
_SCALAR_HEAD = "*output_layer.weight"


@dataclass(frozen=True)
class OptimizedRange:
    """The part of one parameter that this rank's optimizer holds; all tensors are flat views."""

    start: int  # the first element of the flat parameter that is held
    main: Tensor  # float32 main weights of the elements that are held
    moments: dict[str, Tensor]  # running means by name; empty before the first step


class ShardedOptimizer:
    """The optimizer of one model; every rank of the model calls each method together."""

    def __init__(
        self,
        chunks: Sequence[Any],
        groups: RoleGroups,
        optim: OptimSection,
        dtype: torch.dtype,
        total_updates: int,
        slots: Sequence[Slot],
    ) -> None:
        """Build the optimizer around weights that have been loaded.

        The `chunks` are wrapped in DistributedDataParallel. Parameters of bfloat16 get main weights
        in float32. `advance_schedule` will be called `total_updates` times in the whole run.
        `slots` are the places of all named slices of weights, of which Muon takes matrices.
        """
        self._optim = optim
        self._world = groups.world

        settings = _adam_settings(optim, splits_optimizer(optim, groups), dtype)
        if HAVE_TE:  # megatron-core then takes TransformerEngine's Adam for every model
            optimizers.USING_PYTORCH_OPTIMIZER = not any(map(linears_of, chunks))
        self._optimizer = get_megatron_optimizer(
            settings,
            list(chunks),
            _exceptions(optim, settings),
            use_gloo_process_groups=False,
            pg_collection=groups.collection,
        )

        # Of ranks that hold the same weight, the first of their tensor-parallel group counts it in
        # the gradient norm; experts have such a group of their own.
        for optimizer in self._megatron_optimizers():
            if any(group["is_expert_parallel"] for group in optimizer.param_groups):
                optimizer.tp_group = groups.collection.expt_tp

        if optim.name == "muon":
            self._take_over(slots, groups)

        # megatron-core leaves torch its default, which is a loop in Python.
        for inner in self._inner_optimizers():
            if isinstance(inner, torch.optim.AdamW):
                for group in inner.param_groups:
                    group["fused"] = True

        self._scheduler = learning_rate_schedule(self._optimizer, optim, total_updates)
        self._device = next(chunks[0].parameters()).device
        self._gather: WeightGather | None = None
        if splits_optimizer(optim, groups):
            overlapped = overlaps(optim.overlap_param_gather, groups, self._device)
            self._gather = WeightGather(chunks, overlapped)
        self._wait_for_reader: Callable[[], None] | None = None
        self._residency: Residency | None = None  # moves what is streamed; None: nothing is
        # By the id of a main weight in another number format, the elements that it is for.
        self._parts_of_weights: dict[int, Tensor] = {}
        self.skipped_in_a_row = 0  # steps skipped since the last one that was taken
        self.make_moments(steps_taken=0)

    @property
    def name(self) -> OptimizerName:
        """Which optimizer it is."""
        return self._optim.name

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, except for a head with its own; 0 if that is all."""
        rates = [group["lr"] for group in self._groups(with_default_lr=True)]
        return max(rates, default=0.0)

    @property
    def head_learning_rate(self) -> float | None:
        """The learning rate of the scalar head in the next step; None if it has no own one."""
        rates = [group["lr"] for group in self._groups(with_default_lr=False)]
        return max(rates, default=None)

    def advance_schedule(self) -> None:
        """Move the learning-rate schedule on by one update."""
        self._scheduler.step(1)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for megatron-core's schedule."""
        return self._optimizer.scale_loss(loss)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad()

    def step(self) -> OptimizerStep:
        """Update the weights from their gradients, unless the gradient cannot be used.

        A gradient cannot be used if its norm is not finite or above `skip_grad_norm`; the weights
        and moments then stay as they are. Otherwise the weights may not be whole yet when this
        returns: layers wait for theirs, and other readers call `wait_for_weights`.

        Raises:
            TrainingError: `max_skipped_steps` steps in a row were skipped.
        """
        self.wait_for_weights()
        self._optimizer.prepare_grads()
        grad_norm = self._grad_norm()
        if not self._is_usable(grad_norm):
            self._skip(grad_norm)
            return OptimizerStep(grad_norm, taken=False)

        self.let_reader_finish()
        self._clip(grad_norm)
        self._update()
        if self._gather is not None:
            self._gather.start()
        self.skipped_in_a_row = 0
        return OptimizerStep(grad_norm, taken=True)

    def wait_for_weights(self) -> None:
        """Wait until this rank has all its weights as the last step left them."""
        if self._gather is not None:
            self._gather.finish()

    def hold_until(self, wait: Callable[[], None]) -> None:
        """Call `wait` before weights and moments next change, so that a thread can copy them."""
        self.let_reader_finish()
        self._wait_for_reader = wait

    def let_reader_finish(self) -> None:
        """Call what `hold_until` got, unless that has been done."""
        if self._wait_for_reader is not None:
            self._wait_for_reader()
            self._wait_for_reader = None

    def stream(self, residency: Residency, parameters: Sequence[Tensor]) -> None:
        """Take main weights and moments of all `parameters` through the device in parts."""
        self._residency = residency
        owners = self._owners()
        for parameter in parameters:
            place = self._place(parameter, owners)
            if place is not None and place[2].dtype != parameter.dtype:
                _, start, main = place
                flat = parameter.detach().view(-1)[start : start + main.numel()]
                self._parts_of_weights[id(main)] = flat

    def _update(self) -> None:
        """Update main weights, moments and weights from gradients that are ready."""
        if self._residency is None:
            successful = self._optimizer.step_with_ready_grads()
            assert successful, "the optimizer refused finite gradients"
            return

        for inner in self._inner_optimizers():
            # Apex and TransformerEngine count the steps of a group, which is one for all parts.
            counts = [group.get("step") for group in inner.param_groups]
            for part in parts(inner):
                with self._residency.passing(partial(states_of, inner, part)):
                    for group, count in zip(inner.param_groups, counts, strict=True):
                        if count is not None:
                            group["step"] = count
                    with stepping(inner, {id(main) for main in part}):
                        inner.step()
                    for main in part:
                        if id(main) in self._parts_of_weights:
                            self._parts_of_weights[id(main)].copy_(main.detach().view(-1))

    def ranges(self, parameters: Sequence[Tensor]) -> list[OptimizedRange | None]:
        """Return this rank's part of each of the model's parameters; None if it has none."""
        held: list[OptimizedRange | None] = []
        owners = self._owners()
        names = MOMENTS if self.steps_taken else ()
        for parameter in parameters:
            place = self._place(parameter, owners)
            if place is None:
                held.append(None)
                continue
            inner, start, main = place
            state = inner.state.get(main, {})  # indexing would make an entry
            moments = {name: self._flat(state[name]) for name in names if name in state}
            held.append(OptimizedRange(start, self._flat(main), moments))
        return held

    def tensors(self) -> list[Tensor]:
        """Return this rank's main weights, which may be views of parameters, and moments."""
        inners = self._inner_optimizers()
        return list(chain.from_iterable(states_of(inner, mains(inner)) for inner in inners))

    @property
    def is_distributed(self) -> bool:
        """Whether the data-parallel ranks share the main weights and moments between them."""
        return any(
            isinstance(optimizer, DistributedOptimizer) for optimizer in self._megatron_optimizers()
        )

    @property
    def steps_taken(self) -> int:
        """The number of optimizer steps in the moments."""
        for inner in self._inner_optimizers():
            for group in inner.param_groups:
                if "step" in group:  # Apex and TransformerEngine count for a whole group
                    return int(group["step"])
                for parameter in group["params"]:
                    if "step" in inner.state.get(parameter, ()):  # matrices of Muon have none
                        return int(inner.state[parameter]["step"])
        return 0

    def make_moments(self, steps_taken: int) -> None:
        """Make moments of zeros, as they are after `steps_taken` steps, to be filled in.

        On a host there are none after no step. On a GPU they are made at once, since at the first
        step they would take the memory that the first KV cache had, and the second would miss.
        """
        self.let_reader_finish()

        for inner in self._inner_optimizers():
            inner.state.clear()
            if not isinstance(inner, torch.optim.AdamW):
                for group in inner.param_groups:
                    group["step"] = steps_taken
            if self._residency is None:
                if steps_taken or self._device.type == "cuda":
                    make_moments(inner, mains(inner), steps_taken)
            elif steps_taken:
                for part in parts(inner):
                    with self._residency.passing(partial(states_of, inner, part)):
                        make_moments(inner, part, steps_taken)

    def state_dict(self) -> dict[str, int]:
        """Return the numbers that a resumed run needs besides weights and moments."""
        return {
            "updates": self._scheduler.num_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a result of `state_dict`; learning rates are those configured now."""
        self._scheduler.step(state["updates"] - self._scheduler.num_steps)
        self.skipped_in_a_row = state["skipped_in_a_row"]

    def _take_over(self, slots: Sequence[Slot], groups: RoleGroups) -> None:
        """Put Muon into the place of each inner AdamW."""
        hidden = [
            (slot.piece, _main_of(slot.parameter))
            for slot in slots
            if is_hidden_matrix(slot.piece.parameter) and slot.parameter.requires_grad
        ]
        every = groups.collection
        for optimizer in self._megatron_optimizers():
            holders = Holders(every.tp, every.dp_cp)
            if any(group["is_expert_parallel"] for group in optimizer.param_groups):
                holders = Holders(every.expt_tp, every.expt_dp)
            momentum = self._optim.muon_momentum
            optimizer.optimizer = Muon(optimizer.param_groups, hidden, holders, momentum)

    @torch.no_grad()
    def _grad_norm(self) -> float:
        """Return megatron-core's norm of the whole gradient, for which the host waits once."""
        grads: dict[dist.ProcessGroup, list[Tensor]] = {}
        for optimizer in self._megatron_optimizers():
            group = optimizer.get_grad_stats_parallel_group()
            grads.setdefault(group, []).extend(grads_for_norm(optimizer))

        squares = []
        for group, of_group in grads.items():
            square = torch.zeros((), dtype=torch.float32, device=self._device)
            if of_group:  # without tensors, torch would give a norm on the host
                square = get_total_norm(of_group).square()
            dist.all_reduce(square, group=group)
            squares.append(square)
        return math.sqrt(sum((square**0.5) ** 2 for square in torch.stack(squares).tolist()))

    @torch.no_grad()
    def _clip(self, grad_norm: float) -> None:
        """Scale the gradients of the main weights down to the norm `clip_grad`, if it is set."""
        limit = self._optim.clip_grad
        if not 0 < limit < grad_norm:
            return
        norm = torch.full((), grad_norm, dtype=torch.float32, device=self._device)
        for optimizer in self._megatron_optimizers():
            clip_grads_with_norm_(optimizer.get_parameters(), limit, norm)

    def _flat(self, tensor: Tensor) -> Tensor:
        """A main weight or moment, wherever it is."""
        if self._residency is None:
            return tensor.detach().view(-1)
        return self._residency.values(tensor)

    def _owners(self) -> dict[int, torch.optim.Optimizer]:
        """Return the inner optimizer of each main weight, by its id; experts have their own."""
        owners: dict[int, torch.optim.Optimizer] = {}
        for inner in self._inner_optimizers():
            for group in inner.param_groups:
                owners |= {id(main): inner for main in group["params"]}
        return owners

    def _place(
        self, parameter: Tensor, owners: Mapping[int, torch.optim.Optimizer]
    ) -> tuple[torch.optim.Optimizer, int, Tensor] | None:
        """Return the inner optimizer, first element and main weight of a parameter of the model."""
        if not parameter.requires_grad:
            return None
        for optimizer in self._megatron_optimizers():
            if isinstance(optimizer, DistributedOptimizer):
                if parameter in optimizer.model_param_group_index_map:
                    group, number = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][number]
                    held = optimizer._get_model_param_range_map(parameter)["param"]
                    return optimizer.optimizer, held.start, main
                continue

            main = _main_of(parameter)
            if id(main) in owners:
                return owners[id(main)], 0, main
        return None

    def _groups(self, *, with_default_lr: bool) -> list[dict[str, Any]]:
        """Return the parameter groups that follow `lr`, or the others."""
        groups = self._optimizer.param_groups
        return [group for group in groups if group["default_config"] == with_default_lr]

    def _megatron_optimizers(self) -> list[MegatronOptimizer]:
        every = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [each for each in every if each.optimizer is not None]  # None if nothing trains

    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer.optimizer for optimizer in self._megatron_optimizers()]

    def _is_usable(self, grad_norm: float) -> bool:
        """Whether every rank can use its gradient; replicas may differ in the norm's last digit."""
        limit = self._optim.skip_grad_norm
        usable = math.isfinite(grad_norm) and (limit is None or grad_norm <= limit)
        verdict = torch.tensor(float(usable), dtype=torch.float32)
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=self._world)
        return bool(verdict)

    def _skip(self, grad_norm: float) -> None:
        self.skipped_in_a_row += 1
        limit = self._optim.skip_grad_norm
        bound = "" if limit is None else f" (limit skip_grad_norm {limit:g})"

        if dist.get_rank() == 0:
            logger.warning(
                "skipped an optimizer step: gradient norm %g%s, %d in a row",
                grad_norm,
                bound,
                self.skipped_in_a_row,
            )
        if self.skipped_in_a_row >= self._optim.max_skipped_steps:
            raise TrainingError(
                f"{self.skipped_in_a_row} optimizer steps in a row had an unusable gradient, the "
                f"last of norm {grad_norm:g}{bound}; lower the learning rate, look at the rewards "
                "and the data, or raise max_skipped_steps"
            )


def _main_of(parameter: Tensor) -> Tensor:
    """Return the main weight of a parameter, without the distributed optimizer."""
    is_own = parameter.dtype != torch.bfloat16
    return parameter if is_own else vars(parameter)["main_param"]


def _adam_settings(optim: OptimSection, split: bool, dtype: torch.dtype) -> OptimizerConfig:
    """Return megatron-core's settings for every weight; `split`: replicas share the states."""
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        # The scheduler reads it from the parameter groups.
        min_lr=optim.lr * optim.min_lr_ratio,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_eps=optim.adam_eps,
        clip_grad=optim.clip_grad,
        use_distributed_optimizer=split,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )


def _exceptions(
    optim: OptimSection, settings: OptimizerConfig
) -> dict[ParamKey, ParamGroupOverride]:
    """Settings of some weights, by patterns: no decay of vectors, the head's learning rate."""
    exceptions = get_standard_config_overrides(settings)
    if isinstance(optim, ScalarOptimSection) and optim.head_lr is not None:
        exceptions[ParamKey(name=_SCALAR_HEAD)] = {
            "max_lr": optim.head_lr,
            "min_lr": optim.head_lr * optim.min_lr_ratio,
        }
    return exceptions


def learning_rate_schedule(
    optimizer: MegatronOptimizer, optim: OptimSection, total_updates: int
) -> OptimizerParamScheduler:
    """Return linear warm-up, then the decay `lr_decay_style`, with one step for each update.

    The first update counts as number 1 and the decay ends one update after the last, so that
    neither of them has a learning rate of 0.
    """
    decay_steps = max(optim.lr_decay_steps or total_updates, optim.lr_warmup_steps) + 1
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if optim.lr_warmup_steps else optim.lr,
        max_lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )

    scheduler.step(1)
    return scheduler
