"""Hugging Face files to slots of any layout and back, bit for bit, over gloo.

One spawn of ranks does all models and layouts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mrlhf.config.sections import ReferenceSection
from mrlhf.errors import WeightError
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.parameters import role_pieces
from mrlhf.models.weight_files import expected_tensors
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.hf import FileOptions, read_weights, write_weights
from mrlhf.weights.stored import ExpectedTensors
from tests.dist.role_runs import CPU
from tests.ranks import run_ranks
from tests.shards import MIXTURES, MODELS, make_slots, tensor_shapes, tiny_config, tiny_spec

LAYOUTS = [
    ParallelLayout.for_world("actor", 4, AxisSizes(tp=tp, pp=pp))
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))
]
MIXTURE_LAYOUTS = [
    ParallelLayout.for_world("actor", 4, sizes)
    for sizes in (
        AxisSizes(ep=4),
        AxisSizes(pp=2, ep=2),
        AxisSizes(tp=2, ep=2),
        AxisSizes(tp=2, ep=2, etp=2),
        AxisSizes(tp=4),
    )
]
SHARD_BYTES = {"whole": 10**9, "few": 25_000, "many": 4_000}
DTYPES = {"llama": torch.bfloat16}


def _name(model: str, layout: ParallelLayout, cut: str) -> str:
    return f"{model}-tp{layout.tp}-pp{layout.pp}-{cut}"


def _body(rank: int, world_size: int, root: str) -> None:
    for layout in LAYOUTS:
        writers = dist.new_group(
            [layout.rank_at(tp=tp, pp=pp) for pp in range(layout.pp) for tp in range(layout.tp)]
        )

        for model in MODELS:
            spec = tiny_spec(model)
            shapes = tensor_shapes(spec)
            slots = make_slots(role_pieces(spec, layout, rank), DTYPES.get(model, torch.float32))
            read_weights(Path(root) / model, slots, ExpectedTensors(shapes))
            if layout.coordinates(rank).dp == 0:
                for cut, size in SHARD_BYTES.items():
                    directory = Path(root) / _name(model, layout, cut)
                    write_weights(directory, slots, shapes, writers, FileOptions(size))

    _mixtures(rank, Path(root))
    _overwrite_and_cast(rank, Path(root))
    _incomplete(rank, Path(root))
    _engine_passes_over_a_copy_of_the_embedding(Path(root))


def _mixtures(rank: int, root: Path) -> None:
    for number, layout in enumerate(MIXTURE_LAYOUTS):
        writers = dist.new_group(layout.first_copy)
        for model in MIXTURES:
            spec = tiny_spec(model)
            shapes = tensor_shapes(spec)
            slots = make_slots(role_pieces(spec, layout, rank))
            read_weights(root / model, slots, expected_tensors(spec))
            if rank in layout.first_copy:
                forms = family_of(spec).written_forms(spec)
                options = FileOptions(SHARD_BYTES["few"], forms=forms)
                write_weights(root / f"{model}-{number}", slots, shapes, writers, options)


def _overwrite_and_cast(rank: int, root: Path) -> None:
    """A single file of another dtype replaces five files, and a few files replace a single one."""
    spec = tiny_spec("qwen3")
    shapes = tensor_shapes(spec)
    everyone = dist.group.WORLD
    slots_of = {}
    for dtype in (torch.float32, torch.bfloat16):
        slots_of[dtype] = make_slots(role_pieces(spec, LAYOUTS[3], rank), dtype)
        read_weights(root / "qwen3", slots_of[dtype], ExpectedTensors(shapes))

    for size, slots in ((20_000, slots_of[torch.float32]), (10**9, slots_of[torch.bfloat16])):
        write_weights(root / "again", slots, shapes, everyone, FileOptions(size))
    slots = slots_of[torch.float32]
    for size in (10**9, 25_000):
        write_weights(root / "regrown", slots, shapes, everyone, FileOptions(size))


def _incomplete(rank: int, root: Path) -> None:
    spec = tiny_spec("llama")
    slots = make_slots(role_pieces(spec, LAYOUTS[3], rank))
    lost = "model.layers.3.mlp.up_proj.weight"
    kept = [slot for slot in slots if rank < 2 or slot.piece.name != lost]
    with pytest.raises(WeightError, match=r"layers.3.mlp.up_proj.weight: .* do not hold the whole"):
        write_weights(root / "holes", kept, tensor_shapes(spec), dist.group.WORLD, FileOptions())


def _engine_passes_over_a_copy_of_the_embedding(root: Path) -> None:
    """It has no place for the output layer that a tied model's checkpoint may have."""
    section = ReferenceSection(path=str(root / "copied"), tp=2, pp=2, dtype="float32")
    groups = GroupFactory(timeout_s=600.0).role_groups(LAYOUTS[3])
    engine = ModelEngine(section, load_spec(section.path, "lm"), groups, CPU)
    engine.load(section.path, seed=0)
    engine.export(root / "exported", 10**9)


def _load(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys()
        tensors.update(part)
    return tensors


def _assert_same(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    written = _load(directory)
    assert written.keys() == expected.keys(), directory
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype, (directory, name)
        assert torch.equal(written[name], tensor), (directory, name)


def _assert_files_in_order(directory: Path, names: list[str], max_shard_bytes: int) -> None:
    """The index lists the tensors in the model's order; no file is larger than asked for."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == names
    files = list(dict.fromkeys(index["weight_map"].values()))
    assert files == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    assert {file.name for file in directory.iterdir()} == {*files, "model.safetensors.index.json"}
    sizes = [[tensor.nbytes for tensor in load_file(directory / file).values()] for file in files]
    assert all(sum(size) <= max_shard_bytes or len(size) == 1 for size in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))


def _copy_embedding(source: Path, target: Path) -> None:
    """Write the checkpoint with an output layer, as some tools do for models that have none."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def test_round_trip_is_equal_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(11)
    for model in (*MODELS, *MIXTURES):
        theirs = AutoModelForCausalLM.from_config(tiny_config(model))
        theirs.to(DTYPES.get(model, torch.float32)).save_pretrained(tmp_path / model)
    _copy_embedding(tmp_path / "qwen2_tied", tmp_path / "copied")
    run_ranks(4, _body, str(tmp_path))

    for model in MODELS:
        expected = load_file(tmp_path / model / "model.safetensors")
        names = list(tensor_shapes(tiny_spec(model)))
        for layout in LAYOUTS:
            for cut, size in SHARD_BYTES.items():
                directory = tmp_path / _name(model, layout, cut)
                _assert_same(directory, expected)
                if cut != "whole":
                    _assert_files_in_order(directory, names, size)
    _check_transformers_reads_it(
        tmp_path, "qwen2_tied", tmp_path / _name("qwen2_tied", LAYOUTS[3], "many")
    )

    for model in MIXTURES:
        expected = load_file(tmp_path / model / "model.safetensors")
        for number in range(len(MIXTURE_LAYOUTS)):
            _assert_same(tmp_path / f"{model}-{number}", expected)
        _check_transformers_reads_it(tmp_path, model, tmp_path / f"{model}-0")

    again = load_file(tmp_path / "qwen3" / "model.safetensors")
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in again.items()}
    assert [file.name for file in (tmp_path / "again").iterdir()] == ["model.safetensors"]
    _assert_same(tmp_path / "again", cast)
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}

    _assert_same(tmp_path / "regrown", again)
    _assert_same(tmp_path / "exported", load_file(tmp_path / "qwen2_tied" / "model.safetensors"))
    assert not (tmp_path / "holes").exists()


def _check_transformers_reads_it(root: Path, model: str, directory: Path) -> None:
    tiny_config(model).save_pretrained(directory)
    ours, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    theirs = AutoModelForCausalLM.from_pretrained(root / model).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())
