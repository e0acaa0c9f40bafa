"""`ModelEngine` holds one sharded model, runs packed micro-batches through it and trains it.

It gets whole (global) batches. It works on the share that the cut of a batch gives to its
data-parallel rank, and within that on the segments of its context-parallel rank; it returns results
for the whole batch on every rank. It does not know what its outputs are used for, or which loss it
minimises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.sections import AdaptedSection, OptimSection, RoleSection, RouterSection
from mrlhf.device import Device, dtype_on
from mrlhf.errors import WeightError
from mrlhf.gpu.library import try_kernels
from mrlhf.metrics import Tally
from mrlhf.models.adapter_files import read_adapter, write_adapter
from mrlhf.models.build import build_model, slots_of
from mrlhf.models.families import family_of
from mrlhf.models.flops import sequence_flops
from mrlhf.models.freezing import parameter_counts
from mrlhf.models.heads import GPTHiddenModel
from mrlhf.models.lora import is_adapter, trained_shapes, without_adapters
from mrlhf.models.spec import ModelSpec
from mrlhf.models.transformer_engine import uses_transformer_engine
from mrlhf.parallel.collectives import together
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.microbatch import BatchCut, PackedMiniBatch, balance_of, cut_mini_batches
from mrlhf.parallel.pack_routing import PassRouting
from mrlhf.parallel.packing import Select, make_packs
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.phases import Phases
from mrlhf.parallel.prefixes import prompt_groups
from mrlhf.parallel.schedule import Pipeline
from mrlhf.records import Parts
from mrlhf.training.data_parallel import data_parallel
from mrlhf.training.expert_routing import ExpertRouting
from mrlhf.training.first_weights import read_for_all
from mrlhf.training.held_adapters import HeldAdapters
from mrlhf.training.optimizer import ShardedOptimizer
from mrlhf.training.prompt_sharing import check_sharing, shared_prompts
from mrlhf.training.residency import Owner, Residency, Stream
from mrlhf.training.results import Loss, MiniBatchResult, PackResult, merge_results
from mrlhf.training.update_clock import UpdateClock
from mrlhf.weights.hf import FileOptions, write_weights
from mrlhf.weights.init import initialise
from mrlhf.weights.shard import Shape, Slot

logger = logging.getLogger(__name__)


class ModelEngine:
    """One model, sharded over the ranks of its layout.

    A frozen model's engine has no optimizer; after `attach_optimizer` it can be trained. `chunks`
    are this rank's virtual pipeline stages, wrapped in DistributedDataParallel from then on.
    """

    def __init__(
        self,
        section: RoleSection,
        spec: ModelSpec,
        groups: RoleGroups,
        device: Device,
        phases: Phases | None = None,
        name: str = "model",
    ) -> None:
        """Build this rank's shard; the weights are zero until `load` or `initialise`.

        `phases` may stop a pass over packs, and its memory is told what the model `name` holds.
        """
        self.name = name
        self.spec = spec
        self.groups = groups
        self.device = device.torch_device
        self.dtype = dtype_on(section.dtype, device.kind)
        self.path = section.path
        self._section = section
        self._multiple = groups.layout.tp if section.sequence_parallel else 1  # see `make_packs`
        self._is_checked = False
        self.phases = phases or Phases()
        self._family = family_of(spec)
        self._shapes = self._family.tensor_shapes(spec)

        if device.kind == "cuda":
            for sizes in spec.kernel_sizes(self.dtype):
                try_kernels(sizes)
        built = build_model(
            spec,
            groups,
            dtype=self.dtype,
            device=device,
            sequence_parallel=section.sequence_parallel,
            recompute=section.recompute,
            transformer_engine=uses_transformer_engine(section.transformer_engine),
        )
        self._config = built.config
        self.chunks: list[Any] = list(built.chunks)
        self._slots = slots_of(built.chunks, spec, groups.layout, groups.coordinates)
        self.optimizer: ShardedOptimizer | None = None
        self.further_metrics: Sequence[str] = ()  # that a loss may give, on every rank the same
        self._routing: ExpertRouting | None = None
        self._pipeline = Pipeline(self.chunks, self._config, groups, self.device, self.phases)
        self.residency = self._make_residency()
        self.adapters = HeldAdapters(
            self.chunks, self._slots, self._needing_weights, self._let_reader_finish
        )
        self._set_training(False)

    @property
    def tensor_shapes(self) -> Mapping[str, Shape]:
        """The name and full shape of every named tensor of the model."""
        return self._shapes

    @property
    def trained_shapes(self) -> Mapping[str, Shape]:
        """Of these, the tensors that training changes: all, or adapters and a scalar head."""
        return trained_shapes(self._shapes, self.spec, self._family.scalar_head)

    @property
    def slots(self) -> list[Slot]:
        """The places on this rank of each named slice of a weight, after `wait_for_weights`."""
        self.wait_for_weights()
        return self._slots

    def wait_for_weights(self) -> None:
        """Wait until weights read through slots are as the last optimizer step left them."""
        if self.optimizer is not None:
            self.optimizer.wait_for_weights()

    @property
    def output_weight(self) -> Tensor:
        """The last stage's shard of the output layer, [vocab_shard, hidden]; whole in a pass."""
        model = unwrap_model(self.chunks[-1])
        assert isinstance(model, GPTHiddenModel), "a scalar model has no output layer"
        return model.output_weight

    def load(self, path: str | Path, seed: int, needs_head: bool = False) -> None:
        """Read the weights from the Hugging Face checkpoint at `path`.

        A scalar model accepts the checkpoint of a language model, unless `needs_head`: the missing
        head starts from zeros, so that a new critic predicts 0 everywhere. Adapters are read from
        the section's `lora.path`, or drawn. `seed` has no effect if all is read.

        Raises:
            WeightError: the files are missing, damaged, or not those of the model.
        """
        base = [slot for slot in self.slots if not is_adapter(slot.piece.name)]
        own = without_adapters(self.spec)
        section = self._section
        with self._needing_weights():
            self.residency.forget_copies()
            has_head = read_for_all(path, own, base, needs_head, self.groups)
            if isinstance(section, AdaptedSection) and section.lora.path is not None:
                with together(WeightError, self.groups.world):
                    has_head |= read_adapter(section.lora.path, self.spec, self.slots)
            else:
                initialise(self.adapters.slots, self._shapes, seed)
            if not has_head:
                heads = [slot for slot in base if slot.piece.name == self._family.scalar_head]
                initialise(heads, self._shapes, seed, std=0.0)

    def initialise(self, seed: int) -> None:
        """Draw random weights from `seed` and `initializer_range`, the same in every layout."""
        std = self.spec.hf_config["initializer_range"]
        with self._needing_weights():
            self.residency.forget_copies()
            initialise(self.slots, self._shapes, seed, std, self.spec.norm_offset or 0.0)

    def export(self, path: str | Path, max_shard_bytes: int) -> None:
        """Write a Hugging Face checkpoint without its configuration; every rank calls this.

        Of a model with adapters these are written, and a scalar head, as peft does.
        """
        writers = self.groups.first_copy
        if writers is None:
            return
        with self._needing_weights():
            if self.spec.lora is not None:
                write_adapter(path, self.spec, self.slots, writers)
            else:
                forms = self._family.written_forms(self.spec)
                options = FileOptions(max_shard_bytes, forms=forms)
                write_weights(path, self.slots, self._shapes, writers, options)

    def cut(
        self,
        sequences: Sequences,
        select: Select,
        mini_batch_rows: int | None = None,
        together: int | Sequence[int] = 1,
    ) -> BatchCut:
        """Cut a batch for this engine's layout and token budget, and pack this rank's share.

        The packs are on this engine's device, ready for every pass of the step.

        `select` are the positions whose output is wanted, as in `make_packs`; `mini_batch_rows`
        those of one optimizer step, None for all; `together` is as in `cut_mini_batches`.
        """
        layout = self.groups.layout
        segments = self.groups.segments
        lengths = segments.padded(sequences.lengths).tolist()
        costs = self._costs(sequences, select)
        groups = shared = None
        if self._section.share_prompts:
            groups = prompt_groups(sequences)
            shared = shared_prompts(sequences, groups, segments, self.spec)
        mini_batches = cut_mini_batches(
            lengths,
            costs,
            mini_batch_rows or int(sequences.rows[-1]) + 1,
            layout.dp,
            self._section.micro_batch_tokens,
            together,
            in_step=layout.ep > 1,
            shared=shared,
            row_of=sequences.rows.tolist(),
        )

        dp_rank = self.groups.coordinates.dp
        shares = [mini_batch.micro_batches[dp_rank] for mini_batch in mini_batches]
        rows = list(chain.from_iterable(shares))
        packs = make_packs(sequences, rows, select, self._multiple, self.device, segments, groups)

        remaining = iter(packs)
        packed = [
            PackedMiniBatch(mini_batch.rows, list(islice(remaining, len(share))))
            for mini_batch, share in zip(mini_batches, shares, strict=True)
        ]
        return BatchCut(packed, balance_of(mini_batches, shared is not None))

    def forward(
        self,
        packs: Sequence[Pack],
        evaluate: Callable[[Tensor, int], Any],
        routing: PassRouting | None = None,
    ) -> list[Any]:
        """Run packs without gradients; see `Pipeline.forward`."""
        with self.residency.needing("params"):
            self._check_sharing()
            return self._pipeline.forward(packs, evaluate, routing)

    def per_token(
        self,
        packs: Sequence[Pack],
        shape: tuple[int, int],
        evaluate: Callable[[Tensor, int], Tensor],
        channels: int = 1,
        routing: PassRouting | None = None,
    ) -> Tensor:
        """Evaluate every selected position of the whole batch.

        `packs` are this rank's, `shape` is the batch and width of the tables that their places
        refer to. `evaluate` returns [channels, selected]; see `Pipeline.forward`.

        Returns:
            float32 [channels, batch, width] on the host, shared by the ranks of a machine; 0 where
            nothing is selected.
        """
        evaluated = self.forward(packs, evaluate, routing)
        results = [result for result in evaluated if result is not None]
        table = self.groups.machine.table((channels, *shape), torch.float32)

        # Only the last stage has results, and its tensor-parallel peers have the same ones.
        if results and self.groups.coordinates.tp == 0:
            # The numbers stay on the device until the last pack is done.
            flat = torch.cat([result.float() for result in results], dim=1).cpu()
            parts = Parts.join([pack.parts for pack in packs])
            parts.put(table.entries.view(channels, -1), flat)
        return table.complete()

    def attach_optimizer(self, optim: OptimSection, total_updates: int) -> None:
        """Make the model trainable, once its weights are loaded.

        The optimizer moves parameters into buffers of its own, so whatever refers to them (an
        inference engine that shares them) must be connected afterwards. `end_update` will be called
        `total_updates` times in the whole run.
        """
        if self.spec.keeps_weights and self.groups.world.rank() == 0:
            trained, every = parameter_counts(self.spec)
            logger.info("%s: %s of %s parameters train", self.name, f"{trained:,}", f"{every:,}")
        self.residency.close()
        self.chunks = data_parallel(self.chunks, self._config, self.groups, self.device, optim)
        self.residency = self._make_residency(optim.stream)
        with self.residency.needing("params"):
            self.residency.leave()  # gradients would take the memory of main weights
            self.optimizer = ShardedOptimizer(
                self.chunks, self.groups, optim, self.dtype, total_updates, self._slots
            )
            self.residency.add("optimizer", self.optimizer.tensors)
            if optim.stream is not None:
                parameters = chain.from_iterable(chunk.parameters() for chunk in self.chunks)
                self.optimizer.stream(self.residency, list(parameters))

        if self.spec.experts is not None:
            assert isinstance(self._section, RouterSection), "a frozen model is not trained"
            self._routing = ExpertRouting(self.chunks, self.groups, self._section, self.device)

        # With one chunk megatron-core wants a function, with several a list.
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self._config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
        self._config.finalize_model_grads_func = self._reduce_gradients
        self._config.grad_scale_func = self.optimizer.scale_loss
        self._pipeline = Pipeline(self.chunks, self._config, self.groups, self.device, self.phases)
        self._clock = UpdateClock(self.spec, self.groups, self.device, self._pipeline.clock)

    def state_dict(self) -> dict[str, int]:
        """Return the numbers that a resumed run needs besides weights and moments."""
        assert self.optimizer is not None, "a frozen model has no state"
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a result of `state_dict`."""
        assert self.optimizer is not None, "a frozen model has no state"
        self.optimizer.load_state_dict(state)

    def train_mini_batch(
        self,
        packs: Sequence[Pack],
        loss: Loss,
        role: str,
        stop: Callable[[Tally], bool] | None = None,
        routing: PassRouting | None = None,
    ) -> MiniBatchResult:
        """Take one optimizer step on one mini-batch, unless `stop` or the gradient forbids it.

        `loss` and `routing` are those of `Pipeline.forward_backward`; the scalar of `loss` is
        already divided by the global count. `role` is the prefix of the metrics' names; those of a
        tally are in the table of metrics or `further_metrics`. `stop` takes the metrics of the
        whole mini-batch, for which the ranks exchange their parts; if true, no step is taken.

        Raises:
            TrainingError: `max_skipped_steps` steps in a row had a gradient that cannot be used.
            Interrupted: the run stops here; no step was taken.
        """
        assert self.optimizer is not None, "a frozen model cannot be trained: attach an optimizer"
        with self.training():
            self._check_sharing()
            results = self._forward_backward(packs, loss, routing)
            tally = Tally()
            for result in results:
                if result is not None:
                    tally.merge(result.tally)

            kept = [None if result is None else result.kept for result in results]
            load = None if self._routing is None else self._routing.load()
            outcome = MiniBatchResult(role, tally, kept, None, load, self.further_metrics)
            if stop is not None and stop(self.metrics_of([outcome])):
                return outcome
            return replace(outcome, step=self.optimizer.step())

    def training(self) -> AbstractContextManager[None]:
        """Keep all that `train_mini_batch` needs on the device, as it else comes and goes."""
        return self.residency.needing("params", "grads", "optimizer")

    def metrics_of(self, results: Sequence[MiniBatchResult], total: Tally | None = None) -> Tally:
        """Merge the results of a role's mini-batches, in order, over all ranks: `merge_results`.

        Every rank calls it. `total` has the metrics of the mini-batches before them.
        """
        return merge_results(results, total or Tally(), self.groups.results)

    def end_update(self, role: str, total: Tally) -> dict[str, float]:
        """Advance the learning-rate schedule by one update.

        Returns the metrics of `total`, the merged tallies of the mini-batches, the learning rates
        of these steps, and `UpdateClock.metrics`.
        """
        assert self.optimizer is not None, "a frozen model has no update"
        metrics = total.values()
        metrics[f"{role}/lr"] = self.optimizer.learning_rate
        head_lr = self.optimizer.head_learning_rate
        if head_lr is not None:
            metrics[f"{role}/head_lr"] = head_lr
        metrics |= self._clock.metrics(role)
        self.optimizer.advance_schedule()
        return metrics

    def _costs(self, sequences: Sequences, select: Select) -> list[int]:
        """Return the operations of a forward pass over each sequence."""
        if select == "response":
            outputs = sequences.lengths - sequences.prompt_lengths
        else:
            outputs = torch.ones_like(sequences.lengths)
        return sequence_flops(self.spec, sequences.lengths.tolist(), outputs.tolist())

    def _check_sharing(self) -> None:
        """Compare once, before the first pass, if prompts are shared; see `check_sharing`."""
        if self._section.share_prompts and not self._is_checked:
            self._is_checked = True
            check_sharing(self._pipeline, self.spec, self._multiple, self.device, self.groups)

    def _forward_backward(
        self, packs: Sequence[Pack], loss: Loss, routing: PassRouting | None
    ) -> list[PackResult | None]:
        """Accumulate a mini-batch's gradient; the last stage returns a result for each pack."""
        assert self.optimizer is not None
        self._set_training(True)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self._routing is not None:
            self._routing.begin(packs)
        self._clock.start(packs)
        try:
            return self._pipeline.forward_backward(packs, loss, routing)
        finally:
            self._set_training(False)

    def _reduce_gradients(self, *arguments: Any, **options: Any) -> None:
        """Do what a schedule does at its end."""
        self._clock.stop()
        finalize_model_grads(*arguments, **options)
        if self.spec.lora is not None and self.spec.experts is not None:
            self.adapters.sum_parts(self.groups.collection.expt_tp)

    @contextmanager
    def _needing_weights(self) -> Iterator[None]:
        """Have all weights on the device, as the last optimizer step left them."""
        with self.residency.needing("params"):
            self.wait_for_weights()
            yield

    def _let_reader_finish(self) -> None:
        if self.optimizer is not None:
            self.optimizer.let_reader_finish()

    def _make_residency(self, stream: Stream | None = None) -> Residency:
        """The model's memory as it is now: weights, and gradients once it is to be trained."""
        params = list(chain.from_iterable(chunk.parameters() for chunk in self.chunks))
        owners: dict[Owner, Callable[[], list[Tensor]]] = {"params": lambda: params}
        wrapped = [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]
        if wrapped:
            buffers = [(*chunk.buffers, *chunk.expert_parallel_buffers) for chunk in wrapped]
            grads = [buffer.grad_data for buffer in chain(*buffers)]
            owners["grads"] = lambda: grads

        def wait() -> None:
            self.wait_for_weights()
            self._let_reader_finish()

        offload = self._section.offload
        return Residency(self.name, owners, offload, self.phases.memory, wait, stream)

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)
