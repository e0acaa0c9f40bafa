"""What transformers computes of tiny models, and how far from it ours is on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.core.utils import unwrap_model
from torch import Tensor
from transformers import PretrainedConfig

from mrlhf.batch import Sequences
from mrlhf.models.build import BuiltModel, slots_of
from mrlhf.models.lora import A, B
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.packed_sequences import PackedSequences
from mrlhf.parallel.packing import make_packs
from mrlhf.parallel.packs import Pack
from mrlhf.training.data_parallel import _add_weight_gradients_in_place
from mrlhf.weights.shard import Slot
from tests.dist.role_runs import CPU
from tests.models.engines import tensors_of
from tests.models.mixtures import as_in_files
from tests.oracle.plain_lora import PREFIX, Added, adapt, save_adapter

LENGTHS = (5, 19, 12, 24)
# Tokens with which each begins as its neighbour does; the same number of a group says which.
PROMPTS = (2, 2, 8, 8)
GROUPS = (0, 0, 1, 1)
VOCABULARY = 131  # odd: with tensor parallelism the last rank's shard is padded


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    _beside_each_other(rows, lambda first, second: second.copy_(first))
    return rows


def _beside_each_other(rows: Sequence[Tensor], change: Callable[[Tensor, Tensor], Any]) -> None:
    """Call `change` with the rows' prompts, those of a group at once."""
    for first, second in ((0, 1), (2, 3)):
        change(*(rows[number][: PROMPTS[number]] for number in (first, second)))


def _weights(columns: int, shares: bool = False) -> Tensor:
    """What each output is multiplied with in the loss, [tokens, columns].

    If rows share prompts, an output has the weights of all its rows.
    """
    weights = torch.randn(sum(LENGTHS), columns, generator=torch.Generator().manual_seed(4))
    if shares:
        rows = weights.split(list(LENGTHS))
        _beside_each_other(rows, lambda first, second: second.copy_(first.add_(second)))
    return weights


def save_reference(directory: Path, config: PretrainedConfig, is_adapted: bool) -> None:
    """Save a model's config.json, its weights, and what transformers computes from them.

    A model with adapters has their file in a directory beside it.
    """
    scalar = config.num_labels == 1
    auto = transformers.AutoModelForCausalLM
    if scalar:
        auto = transformers.AutoModelForTokenClassification
    model = auto.from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        is_gain = "norm" in parameter_name or parameter_name.endswith("scale")
        parameter.data = 1 + 0.1 * noise if is_gain else 0.08 * noise
    if scalar:
        model.score.bias.data.zero_()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))
        if buffer_name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
    if is_adapted:
        factors = directory.with_name(f"{directory.name}-factors")
        save_adapter(model, factors, torch.Generator().manual_seed(7))
        adapt(model, factors)

    outputs = [model(sequence[None]).logits[0] for sequence in _sequences()]
    (torch.cat(outputs) * _weights(outputs[0].shape[1])).sum().backward()

    config.save_pretrained(directory)
    reference = {
        "weights": tensors_of(model),
        "outputs": [output.detach() for output in outputs],
        "gradients": _gradients_of(model),
    }
    torch.save(reference, directory / "reference.pt")


def _gradients_of(model: Any) -> dict[str, Tensor]:
    """Those of the weights by their names in files, or those of the factors of an adapter."""
    gradients: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, Added):
            for name, a, b in zip(module.names, module.first, module.second, strict=True):
                layer = name.removeprefix(PREFIX)
                gradients[layer + A] = a.grad
                gradients[layer + B] = b.grad
    if gradients:
        return gradients
    parameters = model.named_parameters()
    return as_in_files({name: p.grad for name, p in parameters}, model.config.model_type)


def _named_slice(tensors: dict[str, Tensor], slot: Slot) -> Tensor:
    piece = slot.piece
    return tensors[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)


def fill_slots(slots: list[Slot], tensors: dict[str, Tensor]) -> None:
    for slot in slots:
        slot.store(_named_slice(tensors, slot))


def _pack(rows: list[list[int]], groups: RoleGroups, shares: bool) -> Pack:
    """All rows in one pack, as this rank holds them."""
    sequences = Sequences.of(rows, PROMPTS)
    order = list(range(len(rows)))
    tp = groups.layout.tp
    numbers = torch.tensor(GROUPS) if shares else None
    [pack] = make_packs(sequences, [order], "last", tp, CPU.torch_device, groups.segments, numbers)
    return pack


def _numbers_of_tokens(groups: RoleGroups, shares: bool) -> Tensor:
    """For each of this rank's tokens its number among those of all sequences; -1: padding."""
    rows = torch.arange(1, sum(LENGTHS) + 1).split(list(LENGTHS))
    return _pack([row.tolist() for row in rows], groups, shares).token_ids.long() - 1


def _run(
    model: BuiltModel,
    groups: RoleGroups,
    finish: Callable[..., Any],
    forward_only: bool,
    shares: bool,
) -> list[Any]:
    """All sequences in one pack through megatron-core's own schedule; what `finish` returned, on
    the last stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    pack = _pack([sequence.tolist() for sequence in _sequences()], groups, shares)
    packed = PackedSequences.of_pack(pack, groups.cp)
    tokens = pack.token_ids.long()[None]
    positions = packed.position_ids[None]

    def step(_: Any, module: torch.nn.Module) -> Any:
        return module(tokens, positions, None, packed_seq_params=packed), finish

    layout = groups.layout
    communication = (
        {"p2p_communicator": P2PCommunicator(groups.pp, model.config)} if layout.pp > 1 else {}
    )
    vp_size = layout.vpp if layout.vpp > 1 else None
    return get_forward_backward_func(pp_size=layout.pp, vp_size=vp_size)(
        forward_step_func=step,
        data_iterator=[iter([]) for _ in model.chunks],
        model=model.chunks,
        # The same pack each time, so that the mean gradient is that of one.
        num_microbatches=layout.pp if layout.vpp > 1 else 1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        pg_collection=groups.collection,
        **communication,
    )


def _outputs(module: torch.nn.Module, spec: ModelSpec, output: Tensor) -> Tensor:
    """What transformers gives: logits, of this rank, or the scalars as they are."""
    if spec.head == "scalar":
        return output
    weight = unwrap_model(module).output_weight
    logits = torch.nn.functional.linear(output, weight)
    if spec.logits_cap is not None:
        logits = spec.logits_cap * (logits / spec.logits_cap).tanh()
    return logits / spec.logits_divisor


def worst_output(
    model: BuiltModel,
    spec: ModelSpec,
    groups: RoleGroups,
    expected: list[Tensor],
    shares: bool = False,
) -> float:
    """Largest deviation of an output; 0 before the last stage. Rows may share their prompts."""
    with torch.no_grad():
        results = _run(
            model,
            groups,
            lambda output, non_loss_data: _outputs(model.chunks[-1], spec, output)[0].float(),
            forward_only=True,
            shares=shares,
        )
    if groups.coordinates.pp < groups.layout.pp - 1:
        return 0.0

    whole = results[0].contiguous()
    if spec.head == "lm":
        shards = [torch.empty_like(whole) for _ in range(groups.layout.tp)]
        dist.all_gather(shards, whole, group=groups.tp)
        whole = torch.cat(shards, dim=-1)[:, :VOCABULARY]
    numbers = _numbers_of_tokens(groups, shares)
    wanted = torch.cat(expected)[numbers]
    return (whole - wanted)[numbers >= 0].abs().max().item()


def worst_gradient(
    model: BuiltModel,
    spec: ModelSpec,
    groups: RoleGroups,
    expected: dict[str, Tensor],
    shares: bool = False,
) -> float:
    """Largest deviation of a gradient, relative to the largest entry of its tensor."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    layout = groups.layout
    coordinates = groups.coordinates
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model.config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for chunk in model.chunks:
        chunks.append(
            DistributedDataParallel(model.config, settings, chunk, pg_collection=groups.collection)
        )
        chunks[-1].zero_grad_buffer()
        _add_weight_gradients_in_place(chunks[-1], ours=False)

    weights = _weights(1, shares)
    if spec.head == "lm":
        padded = torch.nn.functional.pad(
            _weights(VOCABULARY, shares), (0, spec.padded_vocab(layout.tp) - VOCABULARY)
        )
        weights = padded.chunk(layout.tp, dim=1)[coordinates.tp]
    numbers = _numbers_of_tokens(groups, shares)
    weights = weights[numbers] * (numbers >= 0)[:, None]
    _run(
        model._replace(chunks=chunks),
        groups,
        lambda output: ((_outputs(chunks[-1], spec, output)[0] * weights).sum(), {}),
        forward_only=False,
        shares=shares,
    )

    worst = 0.0
    for slot in slots_of(chunks, spec, layout, coordinates):
        if not slot.parameter.requires_grad:
            continue
        if getattr(slot.parameter, "is_partial", False):  # as training does once a step
            dist.all_reduce(slot.parameter.main_grad, group=groups.collection.expt_tp)
        gradient = replace(slot, parameter=slot.parameter.main_grad).load()
        deviation = (gradient - _named_slice(expected, slot)).abs().max()
        worst = max(worst, (deviation / expected[slot.piece.name].abs().max()).item())
    return worst
