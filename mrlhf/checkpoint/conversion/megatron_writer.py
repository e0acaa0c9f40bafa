"""Writes a model's weights as a checkpoint of Megatron-LM; see `megatron_reader` for its files.

It writes weights alone, and does not know Hugging Face's files.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrlhf.checkpoint.conversion.megatron_arguments import arguments_of, command_line
from mrlhf.checkpoint.conversion.megatron_delta_nets import to_megatron, with_parts_apart
from mrlhf.checkpoint.conversion.megatron_gpt_oss import alternates, gates_first
from mrlhf.checkpoint.conversion.megatron_names import LAYERS, extra_states, stored_at
from mrlhf.checkpoint.conversion.megatron_reader import ASSETS, RELEASE, TRACKER_FILE
from mrlhf.checkpoint.conversion.model_files import write_config
from mrlhf.checkpoint.conversion.model_source import ModelSource
from mrlhf.checkpoint.conversion.torch_dist import FORMAT, TorchDistWriter
from mrlhf.errors import CheckpointError
from mrlhf.models.families import family_of
from mrlhf.models.families.base import whole_model
from mrlhf.weights.shard import Slot, local_shape, pieces_of

OPTIONS_FILE = "pretrain_gpt_options.txt"


@dataclass(frozen=True)
class MegatronOptions:
    """The form of a checkpoint of Megatron-LM."""

    vocab_divisible_by: int = 128  # rows of zeros are added until this divides the vocabulary
    # Name norms as TransformerEngine's layers do. Megatron-LM always does so, except that its own
    # layers name the norm before a mixture of experts otherwise.
    fused_norms: bool = True


def write_megatron(
    source: ModelSource, directory: Path, options: MegatronOptions, max_file_bytes: int
) -> list[str]:
    """Write weights as a `release` that Megatron-LM loads, into the empty `directory`.

    Returns notes for the user. A CheckpointError says that Megatron-LM cannot express the model.
    """
    spec = source.spec
    if spec.head != "lm":
        raise CheckpointError(
            "Megatron-LM has no model with a scalar head; convert the critic or reward model to "
            "Hugging Face"
        )
    arguments = arguments_of(spec, options.vocab_divisible_by)

    folder = directory / RELEASE
    folder.mkdir(parents=True)
    writer = TorchDistWriter(folder, max_file_bytes)
    _write_weights(source, writer, arguments["padded_vocab_size"], options.fused_norms)
    for key in extra_states(spec):
        writer.write_object(key, None)

    step = source.description.step or 0
    run = _run_arguments(source.dtype, step)
    writer.finish(
        {
            "args": argparse.Namespace(**arguments, **run),
            "checkpoint_version": 3.0,
            "iteration": step,
            "num_floating_point_operations_so_far": 0,
            "content_metadata": {
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
            },
        }
    )
    _write_beside(source, directory, arguments)
    notes = []
    if spec.latent is not None and spec.latent.norm_eps != spec.norm_eps:
        notes.append(
            f"Megatron-LM gives the norms of latents the epsilon {spec.norm_eps} of all norms; "
            f"transformers gives them {spec.latent.norm_eps}"
        )
    if spec.indexer_of(0) is not None:
        notes.append(
            "the indexers are for megatron-core 0.19 and later; older ones compute otherwise"
        )
    if arguments["position_embedding_type"] == "yarn":
        notes.append(
            "pretrain_gpt.py has no options for yarn; set position_embedding_type of GPTModel, and "
            "the attributes yarn_* of its configuration, to the arguments of those names in "
            "common.pt"
        )
    return [
        *notes,
        f"{OPTIONS_FILE} holds the options of pretrain_gpt.py for this model; "
        f"--tokenizer-model is its folder {ASSETS}",
        "there is no optimizer state; Megatron-LM begins at iteration 0",
    ]


def _write_weights(
    source: ModelSource, writer: TorchDistWriter, padded_vocab: int, fused_norms: bool
) -> None:
    """Write every parameter, made of the tensors that it fuses."""
    spec = source.spec
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)
    rules = family.all_rules(spec)
    held = {name: rules[name] for name in family.parameter_names(spec, whole_model(spec))}
    for parameter, rule in with_parts_apart(spec, held).items():
        shape = local_shape(rule, shapes, tp_size=1)
        dtype = source.tensors[rule.names[0]].dtype
        values = torch.empty(shape, dtype=dtype)
        for piece in pieces_of(parameter, rule, shapes, tp_rank=0, tp_size=1):
            Slot(piece, values).store(source.read(piece.name))
        if alternates(spec, parameter):
            values = gates_first(values)

        if parameter.startswith(LAYERS):
            layer, _, name = parameter.removeprefix(LAYERS).partition(".")
            for theirs, part in to_megatron(spec, int(layer), name, values).items():
                home = stored_at(spec, int(layer), theirs, fused_norms)
                offsets = home.numbers + (0,) * part.dim()
                stacked = part.reshape(*(1 for _ in home.numbers), *part.shape)
                writer.write_box(home.key, (*home.sizes, *part.shape), offsets, stacked)
        elif rule.dim is None:
            writer.write_box(parameter, shape, (0,) * values.dim(), values)
        else:
            padded = (padded_vocab, *shape[1:])
            writer.write_box(parameter, padded, (0, 0), values)
            if padded_vocab > shape[0]:
                padding = values.new_zeros(padded_vocab - shape[0], *shape[1:])
                writer.write_box(parameter, padded, (shape[0], 0), padding)


def _run_arguments(dtype: torch.dtype, step: int) -> dict[str, Any]:
    """The arguments about the run itself that Megatron-LM reads from a checkpoint."""
    return {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 1,
        "ckpt_format": FORMAT,
        "use_dist_ckpt": True,
        "iteration": step,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "no_save_optim": True,
        "no_save_rng": True,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tokenizer_type": "HuggingFaceTokenizer",
    }


def _write_beside(source: ModelSource, directory: Path, arguments: Mapping[str, Any]) -> None:
    """Write the files beside the weights; the file that names the weights comes last."""
    assets = directory / ASSETS
    assets.mkdir()
    source.write_assets(assets)
    write_config(source.spec, assets, source.dtype)

    (directory / OPTIONS_FILE).write_text(command_line(arguments), encoding="utf-8")
    (directory / TRACKER_FILE).write_text(RELEASE, encoding="utf-8")
