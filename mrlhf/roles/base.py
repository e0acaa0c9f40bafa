"""What every role is: a sharded model with its process groups, run over packed micro-batches; some
with an optimizer.

A role is given whole (global) batches, works on the share that the plan gives to its data-parallel
rank, and returns results for the whole batch on every rank. It does not know what its outputs are
used for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mrlhf.config.sections import OptimSection, RoleSection
from mrlhf.device import Device, resolve_dtype
from mrlhf.errors import TrainingError
from mrlhf.metrics import Tally
from mrlhf.models.build import build_model, slots_of
from mrlhf.models.families import family_of
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.microbatch import MiniBatch, Pack, Select, make_pack, plan_mini_batches
from mrlhf.parallel.schedule import Pipeline
from mrlhf.weights.hf import read_weights, write_weights
from mrlhf.weights.init import initialise

logger = logging.getLogger(__name__)

NEW_HEAD = "score.weight"
UNUSED_BY_SCALAR = ("lm_head.weight",)


class Role:
    """A frozen model, sharded over the ranks of its layout."""

    def __init__(
        self, section: RoleSection, spec: ModelSpec, groups: RoleGroups, device: Device
    ) -> None:
        self.section, self.spec, self.groups = section, spec, groups
        self.device = device.torch_device
        self.dtype = resolve_dtype(section.dtype, device)
        built = build_model(
            spec,
            groups,
            dtype=self.dtype,
            device=device,
            sequence_parallel=section.sequence_parallel,
            recompute=section.recompute,
        )
        self.config = built.config
        self.model: Any = (
            built.module
        )  # wrapped in DistributedDataParallel once there is an optimizer
        self.slots = slots_of(self.model, spec, groups.layout, groups.coordinates)
        self.pipeline = Pipeline(self.model, self.config, groups, self.device)
        self.model.eval()

    def load(self, path: str | Path, seed: int) -> None:
        """Read the weights from the Hugging Face checkpoint at `path`.

        A scalar model accepts a language model's checkpoint: the missing head starts from zeros, so
        that a new critic predicts 0 everywhere. `seed` is not drawn from where the checkpoint is
        complete.
        """
        scalar = self.spec.head == "scalar"
        shapes = family_of(self.spec).tensor_shapes(self.spec)
        missing = read_weights(
            path,
            self.slots,
            shapes,
            allow_missing=(NEW_HEAD,) if scalar else (),
            ignore=UNUSED_BY_SCALAR if scalar else (),
        )
        if missing:
            heads = [slot for slot in self.slots if slot.piece.name == NEW_HEAD]
            initialise(heads, shapes, seed, head_std=0.0)

    def initialise(self, seed: int) -> None:
        """Draw random weights that depend on `seed` and the model's `initializer_range`, and not on
        the layout.
        """
        shapes = family_of(self.spec).tensor_shapes(self.spec)
        initialise(self.slots, shapes, seed, std=self.spec.hf_config["initializer_range"])

    def export(self, path: str | Path, max_shard_bytes: int) -> None:
        """Write the weights as a Hugging Face checkpoint, its `config.json` excepted; every rank
        calls it.
        """
        if self.groups.coordinates.dp == 0:
            shapes = family_of(self.spec).tensor_shapes(self.spec)
            write_weights(path, self.slots, shapes, self.groups.mp, max_shard_bytes)

    def plan(self, lengths: Sequence[int], mini_batch_rows: int) -> list[MiniBatch]:
        """Cut a batch of sequences of these lengths (tokens) for this role's data parallelism and
        token budget.
        """
        return plan_mini_batches(
            lengths, mini_batch_rows, self.groups.layout.dp, self.section.micro_batch_tokens
        )

    def packs(
        self,
        plan: Sequence[MiniBatch],
        sequences: Sequence[Sequence[int]],
        prompts: Sequence[int],
        select: Select,
    ) -> list[Pack]:
        """This data-parallel rank's micro-batches of all mini-batches in `plan`, in order."""
        multiple = self.groups.layout.tp if self.section.sequence_parallel else 1
        share = [
            rows
            for mini_batch in plan
            for rows in mini_batch.micro_batches[self.groups.coordinates.dp]
        ]
        return [make_pack(sequences, prompts, rows, select, multiple) for rows in share]

    def per_token(
        self,
        packs: Sequence[Pack],
        mask: Tensor,
        evaluate: Callable[[Tensor, int], Tensor],
        channels: int = 1,
    ) -> Tensor:
        """Evaluate every selected position of the whole batch.

        Args:
            packs: this rank's share of the batch.
            mask: bool [batch, width]; a row has as many True entries as its sequence has selected
                positions.
            evaluate: as for `Pipeline.forward`; returns [channels, selected].
            channels: numbers a position.

        Returns:
            float32 [channels, batch, width] on the host of every rank, 0 where the mask is False.
        """
        results = self.pipeline.forward(packs, evaluate)
        table = torch.zeros(channels, *mask.shape, dtype=torch.float32)
        for pack, flat in zip(
            packs, results, strict=False
        ):  # stages before the last have no results
            table[:, pack.rows] = spread(flat.float().cpu(), mask[pack.rows])
        torch.distributed.all_reduce(
            table, group=self.groups.dp_pp
        )  # each entry is non-zero on one rank: exact
        return table


class TrainedRole(Role):
    """A role with gradients, an optimizer and a learning-rate schedule.

    Attributes:
        skipped: optimizer steps skipped in a row because of their gradient, up to now.
    """

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    skipped: int = 0

    def prepare(self, optim: OptimSection, total_updates: int) -> None:
        """Build the optimizer around the loaded weights; `total_updates` calls of `end_update` are
        to come.
        """
        self._optim = optim
        distributed = optim.use_distributed_optimizer
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        collection = self.groups.collection
        self.model = DistributedDataParallel(self.config, ddp, self.model, pg_collection=collection)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=optim.lr
                * optim.min_lr_ratio,  # the scheduler reads it from the parameter groups
                weight_decay=optim.weight_decay,
                adam_beta1=optim.adam_beta1,
                adam_beta2=optim.adam_beta2,
                adam_eps=optim.adam_eps,
                clip_grad=optim.clip_grad,
                use_distributed_optimizer=distributed,
                bf16=self.dtype == torch.bfloat16,
                params_dtype=self.dtype,
            ),
            [self.model],
            use_gloo_process_groups=False,
            pg_collection=collection,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.no_sync_func = self.model.no_sync
        self.pipeline = Pipeline(self.model, self.config, self.groups, self.device)
        self.scheduler = learning_rate_schedule(self.optimizer, optim, total_updates)

    def train_mini_batch(
        self,
        packs: Sequence[Pack],
        loss: Callable[[Tensor, int], tuple[Tensor, Tally]],
        names: Sequence[str],
        stop: Callable[[Tally], bool] | None = None,
    ) -> tuple[Tally, bool]:
        """One optimizer step on one mini-batch, unless `stop` or the gradient forbids it.

        A gradient that is not finite, or whose norm is above `skip_grad_norm`, leaves the weights
        as they are.

        Args:
            packs: this rank's share of the mini-batch.
            loss: as for `Pipeline.forward_backward`, its scalar already divided by the global
                count; the tally holds sums and counts over the pack.
            names: every name that a tally may hold.
            stop: given the tally of the whole mini-batch, whether the step is not to be taken.

        Returns:
            The tally of the whole mini-batch, equal on every rank; with `grad_norm` (before
            clipping) of a step that was taken, and `skipped`, 0 or 1; of a skipped step, what is
            finite. And whether `stop` let it pass.

        Raises:
            TrainingError: `max_skipped_steps` steps in a row were skipped.
        """
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        tallies = self.pipeline.forward_backward(packs, loss)
        self.model.eval()
        share = Tally()
        for tally in tallies:
            share.merge(tally)
        vector = share.to_vector(names)
        torch.distributed.all_reduce(vector, group=self.groups.dp_pp)
        whole = Tally.from_vector(names, vector)
        if stop is not None and stop(whole):
            return whole, False
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        usable = self._usable(grad_norm)
        if usable:
            successful, *_ = self.optimizer.step()
            assert successful, "the optimizer refused finite gradients"
            whole.add("grad_norm", grad_norm, 1)
            self.skipped = 0
        else:
            self._skip(grad_norm)
            whole = whole.finite()
        whole.add("skipped", not usable, 1)
        return whole, True

    def _usable(self, grad_norm: float) -> bool:
        """Whether every rank can use its gradient; replicas may differ in the last digit of the
        norm.
        """
        limit = self._optim.skip_grad_norm
        usable = math.isfinite(grad_norm) and (limit is None or grad_norm <= limit)
        verdict = torch.tensor(float(usable), dtype=torch.float32)
        torch.distributed.all_reduce(
            verdict, torch.distributed.ReduceOp.MIN, group=self.groups.world
        )
        return bool(verdict)

    def _skip(self, grad_norm: float) -> None:
        self.skipped += 1
        limit, most = self._optim.skip_grad_norm, self._optim.max_skipped_steps
        bound = "" if limit is None else f" (limit skip_grad_norm {limit:g})"
        if torch.distributed.get_rank() == 0:
            logger.warning(
                "skipped an optimizer step: gradient norm %g%s, %d in a row",
                grad_norm,
                bound,
                self.skipped,
            )
        if self.skipped >= most:
            raise TrainingError(
                f"{self.skipped} optimizer steps in a row had an unusable gradient, the last of norm {grad_norm:g}"
                f"{bound}; lower the learning rate, look at the rewards and the data, or raise max_skipped_steps"
            )

    def end_update(self, prefix: str, total: Tally, mini_batches: int) -> dict[str, float]:
        """Advance the learning-rate schedule by one update, and tell what the update did.

        Args:
            prefix: of the metrics' names.
            total: the merged tallies of `train_mini_batch`.
            mini_batches: how many were merged.

        Returns:
            The tally's means; `<prefix>/grad_norm`, the mean over the steps taken;
            `<prefix>/optimizer_steps` taken; `<prefix>/skipped_steps`; and `<prefix>/lr`, the rate
            (per step) that they used.
        """
        metrics = total.means()
        skipped = round(metrics.pop("skipped", 0.0) * mini_batches)
        metrics[f"{prefix}/grad_norm"] = metrics.pop("grad_norm", math.nan)
        metrics[f"{prefix}/optimizer_steps"] = mini_batches - skipped
        metrics[f"{prefix}/skipped_steps"] = skipped
        metrics[f"{prefix}/lr"] = max(group["lr"] for group in self.optimizer.param_groups)
        self.scheduler.step(1)
        return metrics


def spread(flat: Tensor, mask: Tensor) -> Tensor:
    """Lay [channels, selected] out as [channels, rows, width], row by row where `mask` [rows,
    width] is True.
    """
    table = flat.new_zeros(flat.shape[0], *mask.shape)
    table[:, mask] = flat
    return table


def learning_rate_schedule(
    optimizer: MegatronOptimizer, optim: OptimSection, total_updates: int
) -> OptimizerParamScheduler:
    """Linear warm-up, then `lr_decay_style`, a step an update.

    The first update counts as number 1 and the decay ends one update after the last, so that
    neither has a rate of 0.
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
