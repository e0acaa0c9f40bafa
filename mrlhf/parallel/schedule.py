"""Runs packed micro-batches through the pipeline of one model, with megatron-core's schedules.

The schedules are 1F1B, and interleaved 1F1B where the ranks have several chunks of the model. This
file knows the model only as a module that takes packed tokens, and the loss only as a function that
its caller hands in. That function gets the output of the model at the positions a pack selects: a
language model's hidden states, or the numbers of a scalar model.

A schedule cannot hang because of timing. The order in which a rank sends, receives and waits
follows from the number of micro-batches alone. Messages between two ranks arrive in the order in
which they were sent (also where the previous rank is the next one too), and no rank asks whether a
message is there. So a schedule that once comes to its end always does, and `test_interleaved` runs
every small number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.nn.functional import pad

from mrlhf.batch import Sequences
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.pack_routing import PassRouting
from mrlhf.parallel.packed_sequences import PackedSequences
from mrlhf.parallel.packing import make_packs
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.phases import Phases
from mrlhf.parallel.pipeline_order import group_size, received, rounds
from mrlhf.parallel.stage_clock import StageClock

Result = TypeVar("Result")


class Pipeline:
    """The pipeline of one model.

    The ranks of one pipeline group call each method together, with the same packs. `clock` measures
    how long this stage waits for others; it is None if there are no others.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: TransformerConfig,
        groups: RoleGroups,
        device: torch.device,
        phases: Phases | None = None,
    ) -> None:
        """Take over a model's chunks; all ranks may stop where `phases` (None: never) say so."""
        self._chunks = list(chunks)
        self._config = config
        self._groups = groups
        self._phases = phases or Phases()

        layout = groups.layout
        # The shortest pack that can run. It replaces the micro-batches after a stop, and fills up
        # the number that an interleaved schedule needs.
        self._multiple = layout.tp if config.sequence_parallel else 1
        [self._shortest] = make_packs(
            Sequences.of([[0]], [1]), [[]], "last", self._multiple, device, groups.segments
        )

        vp_size = layout.vpp if layout.vpp > 1 else None
        self._run = get_forward_backward_func(pp_size=layout.pp, vp_size=vp_size)

        self._communication: dict[str, Communicator] = {}
        self.clock: StageClock | None = None
        if layout.pp > 1:
            self.clock = StageClock(device, groups.coordinates.pp, layout.pp)
            communicator = Communicator(groups.pp, config, self.clock)
            self._communication["p2p_communicator"] = communicator
            config.timers = self.clock

    @torch.no_grad()
    def forward(
        self,
        packs: Sequence[Pack],
        evaluate: Callable[[Tensor, int], Result],
        routing: PassRouting | None = None,
    ) -> list[Result | None]:
        """Run the packs forward only; every rank of the run calls it; Interrupted if it stops here.

        `evaluate` takes the model's output at a pack's selected positions, [selected, hidden] or
        [selected, 1], and the number of the pack. `routing` replays and records the experts.

        Returns:
            On the last stage the results of `evaluate`, one for each pack, and None for a pack
            without rows; on other stages nothing.
        """

        def finish(pack: Pack, number: int, output: Tensor, non_loss_data: bool) -> Result:
            assert non_loss_data
            return evaluate(self._selected(output, pack), number)

        with self._phases.interruptible() as may_begin:
            if not packs:
                return []
            return self._schedule(packs, finish, may_begin, routing, forward_only=True)

    def forward_backward(
        self,
        packs: Sequence[Pack],
        loss: Callable[[Tensor, int], tuple[Tensor, Result]],
        routing: PassRouting | None = None,
    ) -> list[Result | None]:
        """Run the packs forward and backward, then reduce the gradients; every rank calls it.

        `loss` takes what `evaluate` takes in `forward`, and returns a scalar and a result. Results,
        `routing` and errors are as in `forward`; after Interrupted the gradient is of no use.

        The gradient is that of the sum of all scalars that `loss` returns, over all packs (at least
        one) of all data-parallel and context-parallel ranks. A scalar that several context-parallel
        ranks have counts once, if each of them differentiates it in its own numbers alone.
        """
        # The schedule divides by the number of micro-batches and multiplies by the number of
        # context-parallel ranks. The reduction divides by the number of both kinds of ranks.
        scale = self._rounds(packs) * self._groups.layout.dp

        def finish(pack: Pack, number: int, output: Tensor) -> tuple[Tensor, Result]:
            scalar, kept = loss(self._selected(output, pack), number)
            return scalar * scale, kept

        with self._phases.interruptible() as may_begin:
            if self.clock is None:
                return self._schedule(packs, finish, may_begin, routing, forward_only=False)
            with self.clock.measured():
                return self._schedule(packs, finish, may_begin, routing, forward_only=False)

    def _schedule(
        self,
        packs: Sequence[Pack],
        finish: Callable[..., object],
        may_begin: Callable[[int], bool],
        routing: PassRouting | None,
        forward_only: bool,
    ) -> list:
        count = self._rounds(packs)
        filled: list[Pack | None] = list(chain(packs, repeat(None, count - len(packs))))
        if len(self._chunks) > 1:
            size = group_size(count, self._groups.layout.pp)
            self._config.microbatch_group_size_per_vp_stage = size

        def step(
            numbered: Iterator[tuple[int, Pack | None]], model: nn.Module
        ) -> tuple[Tensor, Callable[..., object]]:
            number, pack = next(numbered)
            if pack is None or not may_begin(number):
                # The stages wait for each other's micro-batches, so the schedule goes on to its
                # end; all stages stop at the same micro-batch.
                return self._pass_over(model, pack), partial(_finish_nothing, model)
            if not pack.rows:  # other ranks have some, and send tokens to the experts of this one
                return self._forward_pack(model, pack), partial(_finish_nothing, model)
            return self._forward_pack(model, pack, routing), partial(finish, pack, number)

        rows = [self._rows_sent(pack or self._shortest) for pack in filled]
        for communicator in self._communication.values():
            communicator.expect(rows)

        results: list = self._run(
            forward_step_func=step,
            data_iterator=[iter(enumerate(filled)) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=count,
            seq_length=1,  # not used: the communicator knows the length of every micro-batch
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=self._groups.collection,
            **self._communication,
        )
        return results[: len(packs)]

    def _rounds(self, packs: Sequence[Pack]) -> int:
        layout = self._groups.layout
        return rounds(len(packs), layout.pp, layout.vpp)

    def _forward_pack(
        self, model: nn.Module, pack: Pack, routing: PassRouting | None = None
    ) -> Tensor:
        packed = PackedSequences.of_pack(pack, self._groups.cp, routing)
        token_ids = pack.token_ids.long()[None]
        return model(token_ids, packed.position_ids[None], None, packed_seq_params=packed)

    def _pass_over(self, model: nn.Module, pack: Pack | None) -> Tensor:
        """Run the shortest pack in the place of a pack; what the stages exchange has its shape."""
        # A stage may begin to receive a micro-batch before it knows of the stop.
        chunk = unwrap_model(model)
        hidden = chunk.decoder.input_tensor
        if hidden is not None:
            chunk.set_input_tensor(hidden[: self._rows_sent(self._shortest)])
        output = self._forward_pack(model, self._shortest)
        if pack is None or chunk.post_process:
            return output
        return pad(output, (0, 0, 0, 0, 0, self._rows_sent(pack) - len(output)))

    def _rows_sent(self, pack: Pack) -> int:
        """The number of tokens whose hidden states a stage sends of a pack."""
        return len(pack.token_ids) // self._multiple

    def _selected(self, output: Tensor, pack: Pack) -> Tensor:
        return output[0].index_select(0, pack.select.long())


class Communicator(P2PCommunicator):
    """Exchanges tensors with the neighbouring stages of a pipeline, and measures the waiting.

    All stages know the packs, so it need not ask for the shapes of what it receives.

    In an interleaved schedule a stage goes on computing while a tensor is under way. Only the time
    for which it then still has to wait counts as waiting, as in the other exchanges.
    """

    def __init__(
        self, group: torch.distributed.ProcessGroup, config: TransformerConfig, clock: StageClock
    ) -> None:
        super().__init__(group, config)
        self._clock = clock
        self._chunks = config.virtual_pipeline_model_parallel_size or 1
        self._rows: list[Iterator[int]] = []

    def expect(self, rows: Sequence[int]) -> None:
        """Begin a schedule of micro-batches that have these rows of hidden states each."""
        orders = received(self.pp_group.rank(), self.pp_group.size(), self._chunks, len(rows))
        self._rows = [iter([rows[number] for number in order]) for order in orders]

    def _communicate_shapes(
        self, send_next: Tensor | None, send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int] | None, ...]:
        """The shapes of what comes from the previous and the next stage, in place of megatron's."""
        return tuple(
            [next(rows), 1, self.config.hidden_size] if receives else None
            for receives, rows in zip((recv_prev, recv_next), self._rows, strict=True)
        )

    def _communicate(self, **options: Any) -> Any:
        """Do the same as megatron-core's, with the requests that are under way on the clock."""
        *tensors, requests = super()._communicate(**options)
        if requests:
            requests = {name: _TimedWork(each, self._clock) for name, each in requests.items()}
        return *tensors, requests


class _TimedWork(NamedTuple):
    """A tensor that is under way."""

    request: torch.distributed.Work
    clock: StageClock

    def wait(self) -> None:
        """Wait for it, on the clock."""
        self.clock.start("overlapped-send-recv")
        self.request.wait()
        self.clock.stop("overlapped-send-recv")


def _finish_nothing(
    model: nn.Module, output: Tensor, non_loss_data: bool = False
) -> tuple[Tensor, None] | None:
    """The loss, or the result of a forward pass, of a micro-batch whose result nobody reads."""
    if non_loss_data:
        return None
    # Like every loss it reaches the output layer's weight: replicas exchange a gradient as soon as
    # it is there, so all must have their gradients in the same order.
    weights = unwrap_model(model).output_layer.parameters()
    return (output * 0.0).sum() + sum(weight.sum() * 0.0 for weight in weights), None
