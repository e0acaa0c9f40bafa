"""The tensors that a model needs from the weight files in its directory, to check and to read them.

This file knows heads and families. It does not know roles, ranks or how a tensor is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.models.families import family_of, stated_spec
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.hf import read_weights
from mrlhf.weights.shard import Slot
from mrlhf.weights.stored import ExpectedTensors, ModelFiles, match, read_tensor, survey

_BIAS = "score.bias"  # of the head of a token classifier


def check_weight_files(path: str | Path, spec: ModelSpec, needs_head: bool) -> tuple[str, ...]:
    """Check by the headers of the files in directory `path` that they hold the model.

    If `needs_head`, a scalar model must have its head; a new critic may begin without.

    Returns:
        Remarks for the user, one line each.

    Raises:
        WeightError: there are no safetensors, or they are damaged or not those of the model.
    """
    stored = survey(Path(path))
    if spec.head == "scalar" and needs_head:
        _check_head(stored, spec)
    match(stored, expected_tensors(spec, needs_head))

    if stated_spec(path, spec.head).output_is_embedding and not spec.output_is_embedding:
        untied = (
            f"{path}: config.json says tie_word_embeddings, but the output layer in the files "
            "differs from the embedding; as transformers does, they are kept apart"
        )
        return (*stored.remarks, untied)
    return stored.remarks


def read_model(path: str | Path, spec: ModelSpec, slots: Sequence[Slot], needs_head: bool) -> bool:
    """Fill the `slots` from `path`; whether the head was there. As `check_weight_files`."""
    if spec.head == "scalar" and needs_head:
        _check_head(survey(Path(path)), spec)
    return not read_weights(path, slots, expected_tensors(spec, needs_head))


def head_bias(path: str | Path) -> Tensor:
    """The bias of the head of a token classifier in `path`, [outputs]; one 0 if it has none."""
    bias = survey(Path(path)).tensors.get(_BIAS)
    return torch.zeros(1) if bias is None else read_tensor(bias).float()


def expected_tensors(spec: ModelSpec, with_bias: bool = False) -> ExpectedTensors:
    """The tensors of a model in all forms in which files may hold them, `with_bias` of the head."""
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)
    embedding = family.embedding
    return ExpectedTensors(
        shapes,
        may_lack=(family.scalar_head,) if spec.head == "scalar" else (),
        ignored=(family.language_head, *([_BIAS] if with_bias else [])),
        ignored_prefixes=family.ignored_prefixes(spec),
        other_forms=family.other_forms(spec),
        # If the embeddings are tied, transformers takes either of the two tensors.
        stand_ins={embedding: family.language_head} if spec.output_is_embedding else {},
    )


def _check_head(stored: ModelFiles, spec: ModelSpec) -> None:
    """Refuse files without the head of a reward model: a WeightError says what is there."""
    family = family_of(spec)
    names = {family.scalar_head, f"model.{family.scalar_head}"} & stored.tensors.keys()
    if not names:
        known = family.tensor_shapes(spec)
        others = [
            name
            for name, tensor in stored.tensors.items()
            if name not in known and tensor.shape[-1:] == (spec.hidden_size,)
        ]
        heads = [name for name in others if name != family.language_head]
        found = f"; {heads[0]} is no head that transformers loads" if heads else ""
        raise WeightError(
            f"{stored.directory}: no {family.scalar_head}, so the model cannot score{found}; give "
            f"a {family.class_name('scalar')}, such as train_rm writes"
        )

    for name in names:
        shape = stored.tensors[name].shape
        if shape != (spec.outputs, spec.hidden_size):
            raise WeightError(
                f"{stored.directory}: {name} is {list(shape)} and not [{spec.outputs}, "
                f"{spec.hidden_size}]; config.json should have as many labels, in id2label, and "
                "architectures with a classifier"
            )
