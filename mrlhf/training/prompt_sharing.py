"""Prompts that a model computes once for several sequences: what is spared, and the proof of it.

It knows packs and passes over them. It does not know the loss, nor what the outputs are used for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.errors import TrainingError
from mrlhf.models.flops import sequence_flops
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.packing import make_packs
from mrlhf.parallel.prefixes import SharedPrompts, prompt_groups
from mrlhf.parallel.schedule import Pipeline
from mrlhf.parallel.segments import Segments

# Of the norm of the outputs: what rounding may change, in float32 and in shorter formats.
_MOST_GAP = 1e-3
_MOST_ROUNDED_GAP = 0.1


def shared_prompts(
    sequences: Sequences, groups: Tensor, segments: Segments, spec: ModelSpec
) -> SharedPrompts:
    """Return the sizes of the prompts of `groups` (see `prompt_groups`) in packs of a model."""
    prompts = sequences.prompt_lengths
    return SharedPrompts(
        groups.tolist(),
        segments.padded(prompts).tolist(),
        segments.padded(sequences.lengths - prompts).tolist(),
        sequence_flops(spec, prompts.tolist(), [0] * len(sequences)),
    )


def check_sharing(
    pipeline: Pipeline,
    spec: ModelSpec,
    multiple: int,
    device: torch.device,
    groups: RoleGroups,
) -> None:
    """Compare a prompt that is computed once with one that is computed for each of three sequences.

    Every rank of the model calls this together; `multiple` is that of `make_packs`.

    Raises:
        TrainingError: the outputs differ by more than rounding.
    """
    # The first tokens of a vocabulary are special; models are chaotic where they never saw them.
    ids = [spec.vocab_size * number // 13 for number in range(1, 12)]
    rows = [ids, [*ids[:6], *ids[8:]], [*ids[:6], ids[7]]]
    sequences = Sequences.of(rows, [6] * len(rows))

    def outputs(numbers: Tensor | None) -> Tensor:
        """The outputs of all rows; 0 before the last stage."""
        order = [list(range(len(rows)))]
        [pack] = make_packs(
            sequences, order, "response", multiple, device, groups.segments, numbers
        )
        [found] = pipeline.forward([pack], lambda output, _: output) or [None]
        if found is None:
            return torch.zeros((), device=device)
        whole = found.new_zeros((len(rows) * pack.width, found.shape[1]))
        whole[pack.places.to(device)] = found
        # The ranks that share a sequence have other positions of it where prompts are shared.
        dist.all_reduce(whole, group=groups.cp)
        return whole

    apart = outputs(None)
    once = outputs(prompt_groups(sequences))
    most = _MOST_GAP if apart.dtype == torch.float32 else _MOST_ROUNDED_GAP
    difference = (once - apart).float().norm()
    gap = difference / apart.float().norm().clamp(min=1e-12)
    is_wrong = (~(gap <= most)).int()
    dist.all_reduce(is_wrong, dist.ReduceOp.MAX, group=groups.world)
    if is_wrong:
        raise TrainingError(
            "share_prompts: a prompt that is computed once gives other outputs than one that is "
            f"computed for each response (here by {float(gap):.2g} of their norm); set "
            "share_prompts to false, and report it"
        )
