"""The differences between the versions of megatron-core that mrlhf works with, 0.16 to 0.19.

A function for each; what is asked is whether a name is there, not the number of a version. All else
that mrlhf uses is the same in all of them, which `tests/unit/test_megatron_names.py` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


def grads_for_norm(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the gradients that this rank counts in the norm of the whole gradient."""
    if hasattr(optimizer, "get_grads_for_grad_norm"):  # from 0.19
        grads: list[Tensor] = optimizer.get_grads_for_grad_norm()
        return grads
    return optimizer.get_main_grads_for_grad_norm()


def dense_mlp(submodules: MLPSubmodules) -> ModuleSpec | Callable[..., Any]:
    """Return the spec of a layer's MLP."""
    if hasattr(MLP, "as_mlp_submodule"):  # from 0.18, which warns of a ModuleSpec on every rank
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def submodules_of(mlp: ModuleSpec | partial[Any]) -> MLPSubmodules:
    """Return the submodules in the spec of an MLP that megatron-core has made."""
    submodules: MLPSubmodules = (
        mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    )
    return submodules
