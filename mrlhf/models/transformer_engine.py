"""TransformerEngine's layers: whether a model is built of them, and the proof that they are right.

No GPU has run them yet, so a role has them only if its key is on. It knows no model's weights.
"""

from __future__ import annotations

import logging
import math
from functools import cache, partial
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.errors import ConfigError
from mrlhf.models.layers import plain_layer, transformer_engine_layer
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.collectives import together
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.packed_sequences import PackedSequences
from mrlhf.parallel.packing import make_packs
from mrlhf.parallel.segments import WHOLE

_LENGTHS = (200, 312)  # of the sequences of the trial; tp divides their sum
_MOST_GAP = 0.05  # of the largest number, between two ways; bfloat16 rounds by 0.004
_log = logging.getLogger(__name__)


@cache  # so that it is said once
def uses_transformer_engine(setting: Literal["auto", "on", "off"]) -> bool:
    """Whether a role with this `setting` has TransformerEngine's layers."""
    if setting == "auto" and HAVE_TE:
        _log.info(
            "TransformerEngine is installed and not used: transformer_engine=auto is off until a "
            "GPU has run its layers; on in a role, as actor.transformer_engine=on, tries them there"
        )
    return setting == "on"


def check_layer(
    spec: ModelSpec, config: TransformerConfig, groups: RoleGroups, device: torch.device
) -> None:
    """Compare a layer of TransformerEngine with ours, at the model's sizes and with random weights.

    Every rank of the model calls this together.

    Raises:
        ConfigError: its output or a gradient differs by more than rounding, or it does not run.
    """
    build = partial(build_module, config=config, layer_number=1, pg_collection=groups.collection)
    if groups.layout.vpp > 1:
        build = partial(build, vp_stage=0)
    ours = plain_layer(spec, spec.ropes[0])
    with together(ConfigError, groups.world):
        own = _output_and_gradients(build(ours).to(device), {})
        try:
            layer = build(transformer_engine_layer(spec, spec.ropes[0])).to(device)
            other = _output_and_gradients(layer, ours.submodules.sharded_state_dict_keys_map)
            gaps = {}
            for name, exact in own.items():
                gap = (other[name] - exact).abs().max() / exact.abs().max()
                gaps[name] = float(gap.nan_to_num(nan=math.inf))
            worst = max(gaps, key=lambda name: gaps[name])
            differs = f"differs from ours: {worst} by {gaps[worst]:.2g} times its largest number"
            problem = differs if gaps[worst] > _MOST_GAP else ""
        except Exception as error:  # of any library that it calls
            problem = f"does not run here ({type(error).__name__}: {error})"
        if problem:
            raise ConfigError(
                f"transformer_engine is on, but a layer of TransformerEngine {problem}; set it to "
                "off, and report it"
            )


def _output_and_gradients(layer: torch.nn.Module, names: dict[str, str]) -> dict[str, Tensor]:
    """Return what a layer adds to its input, and the gradients, by the names of our parameters.

    `names` has the beginnings of our names, and those of the layer's that stand for them.
    """
    config: Any = layer.config
    parameters = {}
    for name, parameter in layer.named_parameters():
        for ours, its in names.items():
            name = name.replace(its, ours)
        parameters[name] = parameter
    device = parameter.device
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, config.params_dtype)

    for name in sorted(parameters):
        weight = parameters[name].data
        is_norm = "norm" in name
        weight.copy_(draw(*weight.shape) * (0.1 if is_norm else weight.shape[-1] ** -0.5) + is_norm)
    sharers = config.tensor_model_parallel_size if config.sequence_parallel else 1
    hidden = draw(sum(_LENGTHS) // sharers, 1, config.hidden_size).requires_grad_()

    rows = [[0] * length for length in _LENGTHS]
    sequences = Sequences.of(rows, [1] * len(rows))
    [pack] = make_packs(sequences, [list(range(len(rows)))], "last", 1, device, WHOLE)
    packed = PackedSequences.of_pack(pack)
    output, _ = layer(hidden, attention_mask=None, packed_seq_params=packed)
    output.backward(draw(*output.shape))

    found = {"output": output - hidden, "gradient of the input": hidden.grad}
    for name, parameter in parameters.items():
        found[f"gradient of {name}"] = parameter.grad
    return {name: tensor.detach().float() for name, tensor in found.items()}


def linears_of(model: torch.nn.Module) -> list[Any]:
    """Return the linear layers of TransformerEngine in a model."""
    return [layer for layer in model.modules() if hasattr(layer, "fuse_wgrad_accumulation")]
