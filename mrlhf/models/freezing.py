"""Which named tensors of a model do not train, chosen by patterns; and what is refused.

Pure: this file knows no modules and no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from mrlhf.errors import ConfigError
from mrlhf.models.adapter_files import EXPERTS
from mrlhf.models.families import family_of
from mrlhf.models.lora import trained_shapes
from mrlhf.models.parameters import never_trains
from mrlhf.models.spec import ModelSpec

_WEIGHT = ".weight"


def with_frozen(spec: ModelSpec, patterns: Sequence[str]) -> ModelSpec:
    """Return the model in which the tensors that `patterns` match do not train.

    A pattern is a shell's (`fnmatch`), over a whole name; it does not see adapters.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    names = list(family_of(spec).base_shapes(spec))
    frozen: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, names, n=1, cutoff=0) or names
            raise ConfigError(
                f"freeze holds '{pattern}', which is the name of no tensor of the model, such as "
                f"{near[0]}; give whole names, or patterns of them such as *.self_attn.*"
            )
        frozen.update(found)
    return replace(spec, frozen=frozenset(frozen))


def parameter_counts(spec: ModelSpec) -> tuple[int, int]:
    """Count the numbers in the tensors of a model that train, and in all."""
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)
    trained = trained_shapes(shapes, spec, family.scalar_head)
    counted = [shape for name, shape in trained.items() if not never_trains(name)]
    return sum(map(math.prod, counted)), sum(map(math.prod, shapes.values()))


def check_frozen_tensors(spec: ModelSpec) -> None:
    """Raise a ConfigError if nothing trains, or if what trains cannot be parted from the rest."""
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)
    if all(map(never_trains, trained_shapes(shapes, spec, family.scalar_head))):
        raise ConfigError("freeze leaves nothing to train; name fewer tensors")
    if spec.lora is not None:
        return  # of the base nothing trains

    together = [tuple(dict.fromkeys(rule.names)) for rule in family.all_rules(spec).values()]
    for names in together:
        _check_alike(spec, names, "one parameter of the ranks holds")

    first: dict[str, str] = {}
    for name in shapes:
        if name.endswith(_WEIGHT) and name in spec.frozen:
            bias = f"{name.removesuffix(_WEIGHT)}.bias"
            _check_alike(spec, [name, bias] if bias in shapes else [name], "one product computes")
        mixture, _, own = name.partition(EXPERTS)
        if own:
            alike = first.setdefault(f"{mixture} {own.partition('.')[2]}", name)
            _check_alike(spec, [alike, name], "experts of one layer have")


def _check_alike(spec: ModelSpec, names: Sequence[str], why: str) -> None:
    """Raise a ConfigError if only some of the tensors are frozen."""
    frozen = [name for name in names if name in spec.frozen]
    trained = [name for name in names if name not in spec.frozen]
    if frozen and trained:
        raise ConfigError(
            f"freeze holds {frozen[0]} and not {trained[0]}, which {why}; name both or neither"
        )
