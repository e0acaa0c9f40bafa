"""Reading checkpoints that transformers wrote, what is refused, and random initialisation.

All in one process.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mrlhf.errors import WeightError
from mrlhf.models.families import family_of
from mrlhf.models.parameters import role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.models.weight_files import read_model
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.weights.files import open_to_readers, split_files
from mrlhf.weights.hf import read_weights
from mrlhf.weights.init import initialise
from mrlhf.weights.shard import Slot
from mrlhf.weights.stored import ExpectedTensors
from tests.models.engines import SIZES, spec_of, tensors_of
from tests.models.features import feature_configs
from tests.models.mixtures import mixture_configs
from tests.shards import (
    MIXTURES,
    MODELS,
    full_tensors,
    make_slots,
    stored,
    tensor_shapes,
    tiny_config,
    tiny_spec,
)

LAYOUTS = [
    ParallelLayout(tp=tp, pp=pp, dp=1) for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 4))
]

_FOUR_LAYERS = {**SIZES, "num_hidden_layers": 4}
CONFIGS = feature_configs(_FOUR_LAYERS) | mixture_configs(_FOUR_LAYERS)


def _slots(
    spec: ModelSpec, layout: ParallelLayout, rank: int, dtype: torch.dtype = torch.float32
) -> list[Slot]:
    return make_slots(role_pieces(spec, layout, rank), dtype)


def _equal_slice(slot: Slot, full: torch.Tensor) -> bool:
    piece = slot.piece
    return torch.equal(stored(slot), full.narrow(piece.dim, piece.start, piece.stop - piece.start))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A one-file checkpoint of the tiny llama, to be damaged."""
    save_file(full_tensors(tiny_spec("llama")), tmp_path / "model.safetensors")
    return tmp_path


def _damage(checkpoint: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, checkpoint / "model.safetensors")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("max_shard_size", ["10GB", "20KB"])
def test_reads_what_transformers_saved(model: str, max_shard_size: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(tiny_config(model))
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")

    full = theirs.state_dict()
    spec = tiny_spec(model)
    for layout in LAYOUTS:
        for rank in range(layout.world_size):
            slots = _slots(spec, layout, rank)
            assert read_weights(tmp_path, slots, ExpectedTensors(tensor_shapes(spec))) == []
            assert all(_equal_slice(slot, full[slot.piece.name]) for slot in slots), (layout, rank)


@pytest.mark.parametrize("model", sorted({*MIXTURES} - {"gpt_oss", "gemma4_moe"}))
def test_reads_experts_of_a_layer_that_are_in_one_tensor(model: str, tmp_path: Path) -> None:
    """`save_original_format=False` writes the tensors that the model has in memory."""
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(tiny_config(model))
    theirs.save_pretrained(tmp_path / "as_held", save_original_format=False)
    theirs.save_pretrained(tmp_path / "one_by_one")
    held = load_file(tmp_path / "as_held" / "model.safetensors")
    assert held["model.layers.3.mlp.experts.gate_up_proj"].shape[0] == 4

    spec = tiny_spec(model)
    full = load_file(tmp_path / "one_by_one" / "model.safetensors")
    for layout in (LAYOUTS[0], ParallelLayout(tp=2, pp=2, dp=1)):
        for rank in range(layout.world_size):
            slots = _slots(spec, layout, rank)
            assert read_model(tmp_path / "as_held", spec, slots, needs_head=False)
            assert all(_equal_slice(slot, full[slot.piece.name]) for slot in slots), (layout, rank)

    held["model.layers.3.mlp.experts.down_proj"] = torch.zeros(4, 16, 12)
    save_file(held, tmp_path / "as_held" / "model.safetensors")
    with pytest.raises(
        WeightError, match=r"3\.mlp\.experts\.down_proj is \[4, 16, 12\] and not \[4, 32"
    ):
        read_model(tmp_path / "as_held", spec, slots, needs_head=False)


def test_converts_to_the_dtype_of_the_parameters(checkpoint: Path) -> None:
    spec = tiny_spec("llama")
    slots = _slots(spec, LAYOUTS[1], 1, torch.bfloat16)
    read_weights(checkpoint, slots, ExpectedTensors(tensor_shapes(spec)))
    full = full_tensors(spec)
    assert all(_equal_slice(slot, full[slot.piece.name].to(torch.bfloat16)) for slot in slots)


def test_scalar_model_from_a_policy_and_from_a_classifier(checkpoint: Path, tmp_path: Path) -> None:
    spec = tiny_spec("llama", head="scalar")
    slots = _slots(spec, LAYOUTS[0], 0)
    family = family_of(spec)
    expected = ExpectedTensors(tensor_shapes(spec), (family.scalar_head,), (family.language_head,))
    assert read_weights(checkpoint, slots, expected) == ["score.weight"]
    for slot in slots:
        assert bool(slot.parameter.isnan().any()) == (slot.piece.name == "score.weight")

    config = tiny_config("llama")
    config.num_labels = 1
    config.pad_token_id = 0
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.save_pretrained(tmp_path / "classifier")
    assert read_weights(tmp_path / "classifier", slots, expected) == []
    assert all(_equal_slice(slot, classifier.state_dict()[slot.piece.name]) for slot in slots)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, "no tensor model.norm.weight;"),
        ({"model__layers__4__extra": torch.ones(1)}, "no place for tensor model.layers.4.extra;"),
        ({"lm_head__bias": torch.ones(37)}, "no place for tensor lm_head.bias;"),
        ({"model__norm__weight": torch.ones(31)}, r"model.norm.weight is \[31\] and not \[32\]"),
        ({"model__embed_tokens__weight": torch.ones(40, 32)}, r"is \[40, 32\] and not \[37, 32\]"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    checkpoint: Path, changes: dict, message: str
) -> None:
    _damage(checkpoint, **changes)
    spec = tiny_spec("llama")
    slots = _slots(spec, LAYOUTS[2], 0)
    with pytest.raises(WeightError, match=message):
        read_weights(checkpoint, slots, ExpectedTensors(tensor_shapes(spec)))
    assert all(slot.parameter.isnan().all() for slot in slots)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("-inf"), torch.bfloat16), (1e38, torch.float16)],
)
def test_weights_that_are_not_finite_are_refused(
    value: float, dtype: torch.dtype, checkpoint: Path
) -> None:
    spec = tiny_spec("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = full_tensors(spec)[name].clone()
    tensor[-1, -1] = value
    _damage(checkpoint, **{name.replace(".", "__"): tensor})

    slots = _slots(spec, LAYOUTS[0], 0, dtype)
    with pytest.raises(WeightError) as refusal:
        read_weights(checkpoint, slots, ExpectedTensors(tensor_shapes(spec)))
    file = checkpoint / "model.safetensors"
    assert str(refusal.value).startswith(f"{file}: {name} holds NaN or inf in {dtype}; ")


def test_long_lists_of_names_are_cut(checkpoint: Path) -> None:
    shapes = tensor_shapes(tiny_spec("qwen2"))
    with pytest.raises(WeightError, match=r"q_proj.bias, .*k_proj.bias, .*v_proj.bias and 9 more"):
        read_weights(checkpoint, [], ExpectedTensors(shapes))


@pytest.mark.parametrize("max_shard_bytes", [10**4, 2 * 10**4, 5 * 10**4, 10**9])
def test_files_are_filled_as_the_hub_does(max_shard_bytes: int) -> None:
    full = full_tensors(tiny_spec("qwen2"))
    theirs = split_torch_state_dict_into_shards(full, max_shard_size=max_shard_bytes)
    ours = split_files({name: tensor.nbytes for name, tensor in full.items()}, max_shard_bytes)
    assert ours == list(theirs.filename_to_tensors.values())


@pytest.mark.parametrize("model", ["qwen2_tied", "qwen3"])
def test_initial_weights_do_not_depend_on_the_layout(model: str) -> None:
    spec = tiny_spec(model)
    whole = _slots(spec, LAYOUTS[0], 0)
    initialise(whole, tensor_shapes(spec), seed=5)
    full = {slot.piece.name: stored(slot) for slot in whole}

    for layout in LAYOUTS[1:]:
        for rank in range(layout.world_size):
            slots = _slots(spec, layout, rank)
            initialise(slots, tensor_shapes(spec), seed=5)
            assert all(_equal_slice(slot, full[slot.piece.name]) for slot in slots), (layout, rank)

    initialise(whole, tensor_shapes(spec), seed=6)
    again = {slot.piece.name: stored(slot) for slot in whole}
    assert not torch.equal(full["model.embed_tokens.weight"], again["model.embed_tokens.weight"])


def test_initial_weights_have_the_stated_deviations() -> None:
    spec = tiny_spec("qwen2", head="scalar")
    slots = _slots(spec, LAYOUTS[0], 0)
    initialise(slots, tensor_shapes(spec), 1, 0.1)
    weights = {slot.piece.name: stored(slot) for slot in slots}

    prefix = "model.layers.2."
    assert weights[prefix + "input_layernorm.weight"].eq(1).all()
    assert weights["model.norm.weight"].eq(1).all()
    assert weights[prefix + "self_attn.k_proj.bias"].eq(0).all()
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert weights[prefix + "mlp.gate_proj.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert weights[prefix + "mlp.down_proj.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert weights[prefix + "self_attn.o_proj.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert weights["score.weight"].std().item() == pytest.approx(0.1, rel=0.4)
    gates = [weights[f"model.layers.{layer}.mlp.gate_proj.weight"] for layer in range(4)]
    assert not torch.equal(gates[0], gates[1])

    (head,) = [slot for slot in slots if slot.piece.name == "score.weight"]
    initialise([head], tensor_shapes(spec), 1, std=0.0)
    assert stored(head).eq(0).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_begin_as_those_of_transformers(name: str) -> None:
    config = CONFIGS[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    spec = spec_of(model)
    slots = _slots(spec, LAYOUTS[0], 0)
    shapes = tensor_shapes(spec)
    initialise(slots, shapes, 5, config.initializer_range, spec.norm_offset or 0.0)

    all_theirs = tensors_of(model)
    for tensor in shapes:
        theirs = all_theirs[tensor]
        held = [slot for slot in slots if slot.piece.name == tensor]
        ours = torch.cat([stored(slot).flatten() for slot in held])
        if theirs.unique().numel() == 1:  # norms, biases
            assert ours.eq(theirs.flatten()[0]).all(), tensor
        elif tensor.endswith("A_log"):
            assert theirs.exp().max() <= 16 and 1 < ours.exp().max() <= 16, tensor
        else:
            assert ours.unique().numel() > 1, tensor
            few = theirs.numel() < 1000
            assert few or ours.std().item() == pytest.approx(theirs.std().item(), rel=0.2), tensor


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_written_file_has_the_users_mode(umask: int, mode: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        save_file({"w": torch.zeros(1)}, file)
        open_to_readers(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [file]
