"""What the invariance matrix combines: one line for each axis, and the rules between axes.

A value of an axis that is named like a key of a role's section, or of its optimizer's, is the value
of that key. This file starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mrlhf.config.sections import OptimSection, RoleSection
from mrlhf.parallel.layout import MODEL_AXES, REPLICA_AXES, AxisSizes
from tests.covering import Row, Rule, covering_rows
from tests.oracle.plain_models import MIXTURES, MODELS

LAYERS = 4  # of every model
LOSSES: dict[str, dict[str, Any]] = {
    "sampled KL": {
        "agg": "seq-mean-token-mean",
        "settings": {
            "use_kl_loss": True,
            "kl_loss_type": "low_var_kl",
            "kl_loss_coef": 0.3,
            "entropy_coeff": 0.05,
        },
        "corrected": True,
        # With adapters it is the policy without them, else a model of its own.
        "teacher": {"kl": "jsd", "beta": 0.3, "coef": 0.7},
        "truncated": True,
        "demonstrates": True,
    },
    "full KL": {
        "agg": "seq-mean-token-sum-norm",
        "settings": {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.3},
        "clip_grad": 1.0,
    },
    "holes and contexts": {
        "agg": "token-mean",
        "settings": {"positive_lm_coef": 0.3},
        "holes": True,
        "contexts": True,
        "truncated": True,
    },
    "whole sequences": {
        "agg": "seq-mean-token-mean",
        "loss": "gspo",
        "clip_grad": 1.0,
        "teacher": {"kl": "forward", "coef": 0.4, "top_k": 5, "temperature": 0.9},
    },
}
"""By name, what a `tests.oracle.plain_ppo.Case` says of the policy's loss."""

AXES: dict[str, tuple[Any, ...]] = {
    "ranks": (4, 8),
    "tp": (1, 2, 4),
    "cp": (1, 2, 4),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "uneven_stages": (False, True),
    "dp": (1, 2, 4),
    "ep": (1, 2, 4),
    "etp": (None, 1, 2),  # None: tp without expert parallelism, else 1
    "sequence_parallel": (False, True),
    "share_prompts": (False, True),
    # All that can leave the device does while nothing needs it, or states pass through in parts.
    "offload": (None, "offloaded", "streamed"),
    "recompute": ("none", "full", "core_attn", "mlp"),
    "micro_batch_tokens": (24, 1000),  # a pair of sequences, all sequences
    "use_distributed_optimizer": (True, False),
    "overlap_grad_reduce": (True, False),
    "overlap_param_gather": (True, False),
    # qwen3-moe has the attention of one that is left out, qwen3-next the experts of the other.
    "model": tuple(model for model in MODELS if model not in ("qwen3", "qwen2-moe")),
    "router_losses": (False, True),
    "lora": (False, True),
    "freeze": (False, True),
    "optimizer": ("adamw", "muon"),
    "loss": tuple(LOSSES),
}
# Layers of each stage where they are not equal, by the number of stages.
_UNEVEN = {2: [3, 1], 4: [1, 1, 2, 0]}

_OFFLOAD: dict[str | None, list[str]] = {
    None: [],
    "offloaded": ["params", "grads", "optimizer"],
    "streamed": ["params", "grads"],
}

_SIZES = tuple(axis for axis in (*MODEL_AXES, "dp") if axis in AXES)
_REPLICAS = tuple(axis for axis in REPLICA_AXES if axis in AXES)


def _experts_fit(tp: int, cp: int, dp: int, ep: int, etp: int | None) -> bool:
    """Whether the ranks of a stage can share out experts so."""
    sizes = AxisSizes(tp=tp, cp=cp, ep=ep, etp=etp)
    return sizes.problem("model", tp * cp * dp) is None


RULES = [
    Rule(("ranks", *_SIZES), lambda ranks, *sizes: math.prod(sizes) == ranks),
    Rule(("sequence_parallel", "tp"), lambda split, tp: tp > 1 or not split),
    Rule(("pp", "vpp"), lambda pp, vpp: vpp == 1 or 1 < pp <= LAYERS // vpp),
    Rule(("pp", "uneven_stages"), lambda pp, uneven: pp > 1 or not uneven),
    # Without replicas there is nothing to overlap.
    Rule(
        ("overlap_grad_reduce", *_REPLICAS),
        lambda overlapped, *sizes: math.prod(sizes) > 1 or not overlapped,
    ),
    Rule(
        ("overlap_param_gather", "use_distributed_optimizer", *_REPLICAS),
        lambda overlapped, split, *sizes: (split and math.prod(sizes) > 1) or not overlapped,
    ),
    Rule(("tp", "cp", "dp", "ep", "etp"), _experts_fit),
    Rule(("model", "ep"), lambda model, ep: model in MIXTURES or ep == 1),
    Rule(("model", "etp"), lambda model, etp: model in MIXTURES or etp is None),
    Rule(("model", "router_losses"), lambda model, losses: model in MIXTURES or not losses),
    # Muon takes whole matrices, and does not split its states.
    Rule(("optimizer", "lora"), lambda name, lora: name == "adamw" or not lora),
    # The adapters of the tests are of all layers.
    Rule(("freeze", "lora"), lambda freeze, lora: not (freeze and lora)),
    Rule(("optimizer", "offload"), lambda name, offload: name == "adamw" or offload != "streamed"),
    Rule(
        ("optimizer", "use_distributed_optimizer"),
        lambda name, split: name == "adamw" or not split,
    ),
    # It has two KV heads, which ranks must not share.
    Rule(("model", "tp"), lambda model, tp: model != "olmo2" or tp <= 2),
]


def few_rows() -> list[Row]:
    """Rows of four ranks in which every value of every other axis occurs: those of `make test`."""
    return covering_rows({**AXES, "ranks": (4,)}, RULES, strength=1)


def more_rows(few: Sequence[Row]) -> list[Row]:
    """The rows that hold, together with `few`, every pair of values: those of `make test-full`."""
    return covering_rows(AXES, RULES, cost="ranks", given=few)


def role_keys(row: Row) -> dict[str, Any]:
    """The keys of a role's section that the row sets."""
    keys = {axis: value for axis, value in row.items() if axis in RoleSection.model_fields}
    keys["offload"] = _OFFLOAD[row["offload"]]
    if row["uneven_stages"]:
        keys["pp_layers"] = _UNEVEN[row["pp"] * row["vpp"]]
    return keys


def optim_keys(row: Row) -> dict[str, Any]:
    """The keys of its optimizer's section that the row sets."""
    keys = {axis: value for axis, value in row.items() if axis in OptimSection.model_fields}
    return keys | {"stream": "host" if row["offload"] == "streamed" else None}


def name_of(row: Row) -> str:
    """The row in words; what is off or not set is left out."""
    words = []
    for axis, value in row.items():
        if value is True:
            words.append(axis)
        elif value is False or value is None:
            continue
        elif isinstance(value, int):
            words.append(f"{axis} {value}")
        else:
            words.append(str(value))
    return ", ".join(words)
