"""Built models against transformers: the same logits and gradients in every layout and family."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers

from mrlhf.config.sections import ActorOptimSection
from mrlhf.errors import ConfigError
from mrlhf.host import kernels
from mrlhf.models.build import BuiltModel, Recompute, build_model, slots_of
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.parameters import chunk_prefix, parameter_names, role_pieces
from mrlhf.models.rope import rope_of
from mrlhf.models.spec import Lora, ModelSpec
from mrlhf.models.transformer_engine import linears_of
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.data_parallel import (
    data_parallel,
)
from mrlhf.training.optimizer import ShardedOptimizer
from tests.dist.role_runs import CPU
from tests.models import stand_in_te as stand_ins
from tests.models.features import YARN, YARN_IN_FULL, feature_configs
from tests.models.mixtures import MIXTURES, mixture_configs
from tests.models.parity import (
    VOCABULARY,
    fill_slots,
    save_reference,
    worst_gradient,
    worst_output,
)
from tests.oracle.plain_lora import ALPHA, RANK
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
ONE_KV_HEAD = SIZES | {"num_key_value_heads": 1}
# Models whose gradients are compared too, and what is recomputed in them.
GRADIENTS: dict[str, Recompute] = {
    "mistral-window": "mlp",
    "qwen2-tied": "full",
    "qwen3-tied": "core_attn",
    "qwen3-one-kv-head": "none",
    "scalar": "none",
    "llama-yarn-biases": "none",
    "smollm3": "core_attn",
    "phi3": "mlp",
    "granite": "full",
    "olmo3": "mlp",
    "gemma2": "core_attn",
    "gemma3": "core_attn",
    "gemma4": "core_attn",
    "gemma4-linked": "full",
}


def _configs() -> dict[str, transformers.PretrainedConfig]:
    llama = transformers.LlamaConfig
    mistral = transformers.MistralConfig
    qwen2 = transformers.Qwen2Config
    qwen3 = transformers.Qwen3Config

    return {
        "llama": llama(**SIZES, tie_word_embeddings=False),
        "llama-llama3-rope-tied": llama(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
        "llama-linear-rope": llama(**SIZES, rope_parameters=LINEAR, tie_word_embeddings=False),
        "mistral-window": mistral(
            **SIZES, sliding_window=8, head_dim=32, tie_word_embeddings=False
        ),
        "qwen2": qwen2(**SIZES, tie_word_embeddings=False),
        "qwen2-tied": qwen2(**ONE_KV_HEAD, tie_word_embeddings=True),
        "qwen3-tied": qwen3(**SIZES, head_dim=32, tie_word_embeddings=True),
        "qwen3-one-kv-head": qwen3(**ONE_KV_HEAD, head_dim=8, tie_word_embeddings=False),
        "scalar": qwen2(**SIZES, tie_word_embeddings=True, num_labels=1),
        **feature_configs(SIZES),
    }


# What is recomputed in the mixtures.
MIXTURE_RECOMPUTE: dict[str, Recompute] = {
    "qwen3-moe": "mlp",
    "mixtral": "core_attn",
    "qwen2-moe": "none",
    "glm4-moe": "full",
    "gpt-oss": "core_attn",
    "deepseek-v3": "core_attn",
    "glm4-moe-lite": "none",
    "deepseek-v32": "none",
    "glm-moe-dsa": "core_attn",
    "qwen3-next": "core_attn",
    "qwen3-5": "full",
    "qwen3-5-adapted": "none",
    "gpt-oss-adapted": "full",
    "gemma4-moe": "mlp",
    "gemma4-moe-adapted": "none",
    "gemma4-linked-adapted": "full",
    "qwen3-5-moe": "core_attn",
}
# By world size; experts lie on ranks of data parallelism, of tensor parallelism, or of both.
MIXTURE_LAYOUTS = {
    1: [AxisSizes()],
    2: [
        AxisSizes(tp=2),
        AxisSizes(tp=2, etp=1),
        AxisSizes(pp=2),
        AxisSizes(ep=2),
        AxisSizes(tp=2, ep=2),
        AxisSizes(cp=2),
    ],
    4: [
        AxisSizes(tp=2, pp=2),
        AxisSizes(pp=2, ep=2),
        AxisSizes(pp=2, vpp=2, ep=2),
        AxisSizes(tp=2, ep=2),
        AxisSizes(tp=2, ep=2, etp=2),
        AxisSizes(tp=2, ep=4),
    ],
}
# More of those for one of the mixtures, whose attention has weights of its own.
SINK_LAYOUTS = {
    1: [],
    2: [AxisSizes(cp=2), AxisSizes(pp=2, pp_layers=(1, 3))],
    4: [AxisSizes(tp=2, cp=2)],
}
ADAPTED = ("qwen3-5", "gpt-oss", "gemma4-moe", "gemma4-linked")
DELTA_LAYOUTS = {
    1: [AxisSizes()],
    2: [
        AxisSizes(tp=2),
        AxisSizes(tp=2, ep=2),
        AxisSizes(pp=2, pp_layers=(1, 3)),
        AxisSizes(cp=2),
    ],
}

# And for models with indexers, which are whole on every rank. Stages begin with one.
INDEXERS = ("deepseek-v32", "glm-moe-dsa")
INDEXER_CASES = {
    1: [],
    2: [(AxisSizes(**sizes), INDEXERS) for sizes in ({"tp": 2}, {"cp": 2}, {"ep": 2})],
    4: [
        (AxisSizes(tp=2, pp=2), INDEXERS),
        (AxisSizes(pp=2, vpp=2, ep=2), INDEXERS[:1]),
        (AxisSizes(tp=2, cp=2), INDEXERS[1:]),
    ],
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model its config.json, its weights, and what transformers computes from them."""
    root = tmp_path_factory.mktemp("references")
    configs = _configs() | mixture_configs(SIZES)
    adapted = {f"{name}-adapted": configs[name] for name in ADAPTED}
    for name, config in (configs | adapted).items():
        save_reference(root / name, config, is_adapted=name in adapted)
    return root


def _sequence_parallel(sizes: AxisSizes) -> tuple[bool, ...]:
    """What each layout is built with: both where it is quick, and nothing that has no effect."""
    if sizes.tp == 1:
        return (False,)
    return (False, True) if sizes.ranks == sizes.tp else (True,)


def _names(sizes: AxisSizes) -> list[str]:
    """The models of a layout; others have the few in which all that matters to them differs."""
    many = sizes in (AxisSizes(), AxisSizes(tp=2), AxisSizes(pp=2), AxisSizes(tp=2, pp=2))
    names = list(_configs()) if many else list(GRADIENTS)
    return names if sizes.pp == 1 else [name for name in names if name != "gemma4-linked"]


def _parity(
    rank: int, world_size: int, sizes: AxisSizes, root: str, compiled: bool
) -> dict[str, float]:
    if not compiled:
        kernels.find = lambda dtype: None  # type: ignore[assignment]
    layout = ParallelLayout.for_world("actor", world_size, sizes)
    groups = GroupFactory(timeout_s=600.0).role_groups(layout)
    worst = {}
    for name in _names(sizes) if compiled else (*_names(sizes), "gpt-oss"):
        for sequence_parallel in _sequence_parallel(sizes):
            worst |= _compared(Path(root) / name, name, groups, sequence_parallel)
    return worst


def _compared(
    path: Path, label: str, groups: RoleGroups, sequence_parallel: bool, shares: bool = False
) -> dict[str, float]:
    """The largest deviations of the outputs and, if they are compared, gradients of a model.

    If it `shares`, rows of the pack share prompts, and again they do not.
    """
    spec = load_spec(path, head="scalar" if path.name == "scalar" else "lm")
    if path.name.endswith("-adapted"):
        every = family_of(spec).linear_layers(spec)  # routers too
        spec = replace(spec, lora=Lora(RANK, ALPHA, frozenset(every)))
    reference = torch.load(path / "reference.pt")
    recomputed = GRADIENTS | MIXTURE_RECOMPUTE
    model = build_model(
        spec,
        groups,
        dtype=torch.float32,
        device=CPU,
        sequence_parallel=sequence_parallel,
        recompute=recomputed.get(path.name, "none"),
    )

    slots = slots_of(model.chunks, spec, groups.layout, groups.coordinates)
    names = []
    for number, chunk in enumerate(model.chunks):
        prefix = chunk_prefix(groups.layout, number)
        names += [prefix + parameter for parameter, _ in chunk.named_parameters()]
    assert names == parameter_names(spec, groups.layout, groups.coordinates)
    assert [slot.piece for slot in slots] == role_pieces(spec, groups.layout, dist.get_rank())
    fill_slots(slots, reference["weights"])

    label += " sp" if sequence_parallel else ""
    worst = {}
    for shared in (False, True) if shares else (False,):
        title = f"{label} shared" if shared else label
        worst[title] = worst_output(model, spec, groups, reference["outputs"], shared)
        if path.name in recomputed:
            gradients = reference["gradients"]
            found = worst_gradient(model, spec, groups, gradients, shared)
            worst[f"{title} gradient"] = found
    return worst


SIZES_OF_LAYOUTS = [
    AxisSizes(),
    AxisSizes(tp=2),
    AxisSizes(pp=2),
    AxisSizes(cp=2),
    AxisSizes(tp=2, pp=2),
    AxisSizes(tp=4),
    AxisSizes(cp=4),
    AxisSizes(tp=2, cp=2),
    AxisSizes(cp=2, pp=2, vpp=2),
    AxisSizes(pp=2, vpp=2),
    AxisSizes(tp=2, pp=2, vpp=2),
    AxisSizes(pp=2, vpp=3, pp_layers=(0, 1, 1, 1, 1, 0)),
    AxisSizes(pp=4, pp_layers=(1, 2, 1, 0)),
]


@pytest.mark.parametrize("sizes", SIZES_OF_LAYOUTS, ids=str)
def test_packed_outputs_and_gradients_equal_transformers(
    references: Path, sizes: AxisSizes
) -> None:
    for worst in run_ranks(sizes.ranks, _parity, sizes, str(references), True):
        names = _names(sizes)
        gradients = GRADIENTS.keys() & {*names}
        assert len(worst) == (len(names) + len(gradients)) * len(_sequence_parallel(sizes))
        assert max(worst.values()) < 1e-4, worst


def _mixture_parity(
    rank: int,
    world_size: int,
    root: str,
    cases: list[tuple[AxisSizes, tuple[str, ...]]],
    shares: bool = False,
) -> dict[str, float]:
    factory = GroupFactory(timeout_s=600.0)
    worst = {}
    for sizes, names in cases:
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, sizes))
        for name in names:
            label = f"{name} {sizes} vpp {sizes.vpp}"
            for sequence_parallel in (False, True) if sizes.tp > 1 else (False,):
                worst |= _compared(Path(root) / name, label, groups, sequence_parallel, shares)
    return worst


@pytest.mark.parametrize("world_size", MIXTURE_LAYOUTS)
def test_mixtures_equal_transformers(references: Path, world_size: int) -> None:
    names = MIXTURES if world_size != 2 else (*MIXTURES, "glm4-moe-lite", "gpt-oss-adapted")
    cases = [(sizes, names) for sizes in MIXTURE_LAYOUTS[world_size]]
    if world_size == 2:  # gate and up of an expert, one matrix in files, are split in halves
        cases.append((AxisSizes(tp=2), ("gemma4-moe-adapted",)))
    cases += [(sizes, ("gpt-oss",)) for sizes in SINK_LAYOUTS[world_size]]
    cases += INDEXER_CASES[world_size]
    if world_size == 2:  # whose adapters are on layers that every rank has whole, too
        cases.append((AxisSizes(tp=2), ("gemma4-linked-adapted",)))
    for worst in run_ranks(world_size, _mixture_parity, str(references), cases):
        assert max(worst.values()) < 1e-4, worst


@pytest.mark.parametrize("world_size", DELTA_LAYOUTS)
def test_delta_nets_equal_transformers(references: Path, world_size: int) -> None:
    cases = [(sizes, ("qwen3-next", "qwen3-5-moe")) for sizes in DELTA_LAYOUTS[world_size]]
    dense = ("qwen3-5", "qwen3-5-adapted")
    cases += [(sizes, dense) for sizes in DELTA_LAYOUTS[world_size] if sizes.ep == 1]
    for worst in run_ranks(world_size, _mixture_parity, str(references), cases, True):
        # The norm after a state divides by small numbers, which enlarges what is rounded.
        assert max(worst.values()) < 3e-4, worst


def test_ranks_share_sequences_without_compiled_attention(references: Path) -> None:
    for worst in run_ranks(2, _parity, AxisSizes(cp=2), str(references), False):
        assert max(worst.values()) < 1e-4, worst


def _of_transformer_engine(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Deviations of models of stand-ins for TransformerEngine's layers, and what is refused."""
    spec = load_spec(Path(root), head="lm")
    reference = torch.load(Path(root) / "reference.pt")
    factory = GroupFactory(timeout_s=600.0)
    groups = factory.role_groups(ParallelLayout(tp=world_size, pp=1, dp=1))

    def build(
        transformer_engine: bool, sequence_parallel: bool = True, groups: RoleGroups = groups
    ) -> BuiltModel:
        return build_model(
            spec,
            groups,
            dtype=torch.float32,
            device=CPU,
            sequence_parallel=sequence_parallel,
            recompute="none",
            transformer_engine=transformer_engine,
        )

    found: dict[str, Any] = {"worst": 0.0, "refused": {}, "made": []}
    for sequence_parallel in (False, True):
        model = build(True, sequence_parallel)
        slots = slots_of(model.chunks, spec, groups.layout, groups.coordinates)
        fill_slots(slots, reference["weights"])
        output = worst_output(model, spec, groups, reference["outputs"])
        gradient = worst_gradient(model, spec, groups, reference["gradients"])
        found["worst"] = max(found["worst"], output, gradient)
        linears = linears_of(model.chunks[0])
        assert len(linears) == 4 * spec.num_layers
        assert all(linear.gradient_accumulation_fusion for linear in linears)

    stages = ParallelLayout.for_world("actor", world_size, AxisSizes(pp=2, vpp=2))
    build(True, groups=factory.role_groups(stages))
    for fault in stand_ins.BREAKS:
        with mock.patch.object(stand_ins, "BREAK", fault), pytest.raises(ConfigError) as refused:
            build(True)
        found["refused"][fault] = str(refused.value)

    def adam(params: Any, adam_w_mode: bool, **options: Any) -> torch.optim.Optimizer:
        found["made"].append(adam_w_mode)
        return torch.optim.AdamW(params, **options)

    optim = ActorOptimSection()
    for transformer_engine in (True, False):
        model = build(transformer_engine)
        chunks = data_parallel(model.chunks, model.config, groups, CPU.torch_device, optim)
        slots = slots_of(chunks, spec, groups.layout, groups.coordinates)
        with (
            mock.patch("mrlhf.training.optimizer.HAVE_TE", True),
            mock.patch("megatron.core.optimizer.Adam", adam),
            mock.patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False),
        ):
            ShardedOptimizer(chunks, groups, optim, torch.float32, 1, slots)
    return found


def test_layers_of_transformer_engine_are_tried_and_used(references: Path) -> None:
    path = str(references / "qwen3-tied")
    for found in run_ranks(2, _of_transformer_engine_with_stand_ins, path):
        assert found["worst"] < 1e-4
        refused = found["refused"]
        assert "does not run here (RuntimeError: no attention backend)" in refused.pop("an error")
        for fault, message in refused.items():
            assert re.search(r"differs from ours: .* by [\d.]+ times its", message), fault
        assert found["made"] == [True]  # the other model has torch's Adam


def _of_transformer_engine_with_stand_ins(rank: int, world_size: int, root: str) -> dict[str, Any]:
    with (
        mock.patch("mrlhf.models.layers.transformer_engine_layer", stand_ins.layer),
        mock.patch("mrlhf.models.transformer_engine.transformer_engine_layer", stand_ins.layer),
    ):
        return _of_transformer_engine(rank, world_size, root)


def _bfloat16(rank: int, world_size: int, root: str) -> float:
    """Deviation of the outputs of two stages in bfloat16."""
    path = Path(root) / "qwen3-tied"
    spec = load_spec(path, head="lm")
    reference = torch.load(path / "reference.pt")
    factory = GroupFactory(timeout_s=600.0)

    groups = factory.role_groups(ParallelLayout(tp=1, pp=world_size, dp=1))
    options: dict[str, Any] = {"device": CPU, "sequence_parallel": True, "recompute": "none"}
    model = build_model(spec, groups, dtype=torch.bfloat16, **options)
    fill_slots(
        slots_of(model.chunks, spec, groups.layout, groups.coordinates), reference["weights"]
    )
    assert {parameter.dtype for parameter in model.chunks[0].parameters()} == {torch.bfloat16}
    return worst_output(model, spec, groups, reference["outputs"])


def test_bfloat16(references: Path) -> None:
    results = run_ranks(2, _bfloat16, str(references))
    assert 1e-4 < results[-1] < 0.1, results  # outputs reach 3; bfloat16 has 8 bits


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    _configs()["llama"].save_pretrained(tmp_path)
    return load_spec(tmp_path, head="lm")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        # transformers ignores the factor in Llama.
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        LLAMA3,
        LINEAR,
        YARN,
        YARN_IN_FULL,
    ],
)
def test_rotation_equals_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    frequencies, scale = rope_of(load_spec(tmp_path, head="lm"))
    assert torch.equal(frequencies, expected.inv_freq)
    assert scale == expected.attention_scaling
