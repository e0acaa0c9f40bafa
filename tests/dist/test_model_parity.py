"""Built models against transformers: the same logits and gradients in every layout and family."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.sections import ActorOptimSection
from mrlhf.errors import ConfigError
from mrlhf.host import kernels
from mrlhf.models.build import BuiltModel, Recompute, build_model, slots_of
from mrlhf.models.families import load_spec
from mrlhf.models.lora import A, B
from mrlhf.models.parameters import chunk_prefix, parameter_names, role_pieces
from mrlhf.models.rope import rope_of
from mrlhf.models.spec import Lora, ModelSpec
from mrlhf.models.transformer_engine import linears_of
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.packed_sequences import PackedSequences
from mrlhf.parallel.packing import make_packs
from mrlhf.parallel.packs import Pack
from mrlhf.training.data_parallel import (
    _add_weight_gradients_in_place,
    data_parallel,
)
from mrlhf.training.optimizer import ShardedOptimizer
from mrlhf.weights.shard import Slot
from tests.dist.role_runs import CPU
from tests.models import stand_in_te as stand_ins
from tests.models.engines import tensors_of
from tests.models.features import YARN, YARN_IN_FULL, feature_configs
from tests.models.mixtures import MIXTURES, as_in_files, mixture_configs
from tests.oracle.plain_lora import ALPHA, PREFIX, RANK, Added, adapt, save_adapter
from tests.ranks import run_ranks

LENGTHS = (5, 19, 12, 24)
VOCABULARY = 131  # odd: with tensor parallelism the last rank's shard is padded
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
    "gemma3": "core_attn",
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
    "qwen3-next": "core_attn",
    "qwen3-5": "full",
    "qwen3-5-adapted": "none",
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
DELTA_LAYOUTS = {
    1: [AxisSizes()],
    2: [AxisSizes(tp=2), AxisSizes(tp=2, ep=2), AxisSizes(pp=2, pp_layers=(1, 3))],
}


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def _weights(columns: int) -> Tensor:
    """What each output is multiplied with in the loss, [tokens, columns]."""
    return torch.randn(sum(LENGTHS), columns, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model its config.json, its weights, and what transformers computes from them."""
    root = tmp_path_factory.mktemp("references")
    adapted = {"qwen3-5-adapted": mixture_configs(SIZES)["qwen3-5"]}
    for name, config in (_configs() | mixture_configs(SIZES) | adapted).items():
        scalar = name == "scalar"
        auto = transformers.AutoModelForCausalLM
        if scalar:
            auto = transformers.AutoModelForTokenClassification
        model = auto.from_config(config, attn_implementation="eager").eval()
        torch.manual_seed(0)
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.data = 1 + 0.1 * noise if "norm" in parameter_name else 0.08 * noise
        if scalar:
            model.score.bias.data.zero_()
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
        if name in adapted:
            save_adapter(model, root / f"{name}-factors", torch.Generator().manual_seed(7))
            adapt(model, root / f"{name}-factors")

        outputs = [model(sequence[None]).logits[0] for sequence in _sequences()]
        (torch.cat(outputs) * _weights(outputs[0].shape[1])).sum().backward()

        config.save_pretrained(root / name)
        reference = {
            "weights": tensors_of(model),
            "outputs": [output.detach() for output in outputs],
            "gradients": _gradients_of(model),
        }
        torch.save(reference, root / name / "reference.pt")
    return root


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


def _fill(slots: list[Slot], tensors: dict[str, Tensor]) -> None:
    for slot in slots:
        slot.store(_named_slice(tensors, slot))


def _pack(rows: list[list[int]], groups: RoleGroups) -> Pack:
    """All rows in one pack, as this rank holds them."""
    sequences = Sequences.of(rows, [1] * len(rows))
    order = list(range(len(rows)))
    tp = groups.layout.tp
    [pack] = make_packs(sequences, [order], "last", tp, CPU.torch_device, groups.segments)
    return pack


def _numbers_of_tokens(groups: RoleGroups) -> Tensor:
    """For each of this rank's tokens its number among those of all sequences; -1: padding."""
    rows = torch.arange(1, sum(LENGTHS) + 1).split(list(LENGTHS))
    return _pack([row.tolist() for row in rows], groups).token_ids.long() - 1


def _run(
    model: BuiltModel, groups: RoleGroups, finish: Callable[..., Any], forward_only: bool
) -> list[Any]:
    """All sequences in one pack through megatron-core's own schedule; what `finish` returned, on
    the last stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    pack = _pack([sequence.tolist() for sequence in _sequences()], groups)
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
    return torch.nn.functional.linear(output, weight) / spec.logits_divisor


def _worst_output(
    model: BuiltModel, spec: ModelSpec, groups: RoleGroups, expected: list[Tensor]
) -> float:
    """Largest deviation of an output; 0 before the last stage."""
    with torch.no_grad():
        results = _run(
            model,
            groups,
            lambda output, non_loss_data: _outputs(model.chunks[-1], spec, output)[0].float(),
            forward_only=True,
        )
    if groups.coordinates.pp < groups.layout.pp - 1:
        return 0.0

    whole = results[0].contiguous()
    if spec.head == "lm":
        shards = [torch.empty_like(whole) for _ in range(groups.layout.tp)]
        dist.all_gather(shards, whole, group=groups.tp)
        whole = torch.cat(shards, dim=-1)[:, :VOCABULARY]
    numbers = _numbers_of_tokens(groups)
    wanted = torch.cat(expected)[numbers]
    return (whole - wanted)[numbers >= 0].abs().max().item()


def _worst_gradient(
    model: BuiltModel, spec: ModelSpec, groups: RoleGroups, expected: dict[str, Tensor]
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

    weights = _weights(1)
    if spec.head == "lm":
        padded = torch.nn.functional.pad(
            _weights(VOCABULARY), (0, spec.padded_vocab(layout.tp) - VOCABULARY)
        )
        weights = padded.chunk(layout.tp, dim=1)[coordinates.tp]
    numbers = _numbers_of_tokens(groups)
    weights = weights[numbers] * (numbers >= 0)[:, None]
    _run(
        model._replace(chunks=chunks),
        groups,
        lambda output: ((_outputs(chunks[-1], spec, output)[0] * weights).sum(), {}),
        forward_only=False,
    )

    worst = 0.0
    for slot in slots_of(chunks, spec, layout, coordinates):
        if not slot.parameter.requires_grad:
            continue
        gradient = replace(slot, parameter=slot.parameter.main_grad).load()
        deviation = (gradient - _named_slice(expected, slot)).abs().max()
        worst = max(worst, (deviation / expected[slot.piece.name].abs().max()).item())
    return worst


def _sequence_parallel(sizes: AxisSizes) -> tuple[bool, ...]:
    """What each layout is built with: both where it is quick, and nothing that has no effect."""
    if sizes.tp == 1:
        return (False,)
    return (False, True) if sizes.ranks == sizes.tp else (True,)


def _names(sizes: AxisSizes) -> list[str]:
    """The models of a layout; others have the few in which all that matters to them differs."""
    many = sizes in (AxisSizes(), AxisSizes(tp=2), AxisSizes(pp=2), AxisSizes(tp=2, pp=2))
    return list(_configs()) if many else list(GRADIENTS)


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
    path: Path, label: str, groups: RoleGroups, sequence_parallel: bool
) -> dict[str, float]:
    """The largest deviations of the outputs and, if they are compared, gradients of a model."""
    spec = load_spec(path, head="scalar" if path.name == "scalar" else "lm")
    if path.name.endswith("-adapted"):
        spec = replace(spec, lora=Lora(RANK, ALPHA))
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
    _fill(slots, reference["weights"])

    label += " sp" if sequence_parallel else ""
    worst = {label: _worst_output(model, spec, groups, reference["outputs"])}
    if path.name in recomputed:
        gradients = reference["gradients"]
        worst[f"{label} gradient"] = _worst_gradient(model, spec, groups, gradients)
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
        assert len(worst) == (len(_names(sizes)) + len(GRADIENTS)) * len(_sequence_parallel(sizes))
        assert max(worst.values()) < 1e-4, worst


def _mixture_parity(
    rank: int, world_size: int, root: str, cases: list[tuple[AxisSizes, tuple[str, ...]]]
) -> dict[str, float]:
    factory = GroupFactory(timeout_s=600.0)
    worst = {}
    for sizes, names in cases:
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, sizes))
        for name in names:
            label = f"{name} {sizes} vpp {sizes.vpp}"
            for sequence_parallel in (False, True) if sizes.tp > 1 else (False,):
                worst |= _compared(Path(root) / name, label, groups, sequence_parallel)
    return worst


@pytest.mark.parametrize("world_size", MIXTURE_LAYOUTS)
def test_mixtures_equal_transformers(references: Path, world_size: int) -> None:
    names = MIXTURES if world_size != 2 else (*MIXTURES, "glm4-moe-lite")
    cases = [(sizes, names) for sizes in MIXTURE_LAYOUTS[world_size]]
    cases += [(sizes, ("gpt-oss",)) for sizes in SINK_LAYOUTS[world_size]]
    for worst in run_ranks(world_size, _mixture_parity, str(references), cases):
        assert max(worst.values()) < 1e-4, worst


@pytest.mark.parametrize("world_size", DELTA_LAYOUTS)
def test_delta_nets_equal_transformers(references: Path, world_size: int) -> None:
    cases = [(sizes, ("qwen3-next", "qwen3-5-moe")) for sizes in DELTA_LAYOUTS[world_size]]
    dense = ("qwen3-5", "qwen3-5-adapted")
    cases += [(sizes, dense) for sizes in DELTA_LAYOUTS[world_size] if sizes.ep == 1]
    for worst in run_ranks(world_size, _mixture_parity, str(references), cases):
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
        _fill(slots, reference["weights"])
        output = _worst_output(model, spec, groups, reference["outputs"])
        gradient = _worst_gradient(model, spec, groups, reference["gradients"])
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
    _fill(slots_of(model.chunks, spec, groups.layout, groups.coordinates), reference["weights"])
    assert {parameter.dtype for parameter in model.chunks[0].parameters()} == {torch.bfloat16}
    return _worst_output(model, spec, groups, reference["outputs"])


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
