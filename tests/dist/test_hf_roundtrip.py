"""Hugging Face files to slots of any layout and back, bit for bit, over gloo; all models and
layouts in one spawn.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrlhf.errors import WeightError
from mrlhf.models.parameters import role_pieces
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.weights.hf import read_weights, write_weights
from tests.ranks import run_ranks
from tests.shards import MODELS, make_slots, tensor_shapes, tiny_config, tiny_spec

LAYOUTS = [ParallelLayout.for_world("actor", 4, tp, pp) for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))]
SHARD_BYTES = {"whole": 10**9, "few": 25_000, "many": 4_000}
DTYPES = {"llama": torch.bfloat16}


def _name(model: str, layout: ParallelLayout, cut: str) -> str:
    return f"{model}-tp{layout.tp}-pp{layout.pp}-{cut}"


def _body(rank: int, world_size: int, root: str) -> None:
    for layout in LAYOUTS:
        writers = dist.new_group([layout.rank_at(tp, 0, pp) for pp in range(layout.pp) for tp in range(layout.tp)])
        for model in MODELS:
            spec = tiny_spec(model)
            shapes = tensor_shapes(spec)
            slots = make_slots(role_pieces(spec, layout, rank), DTYPES.get(model, torch.float32))
            read_weights(Path(root) / model, slots, shapes)
            if layout.coordinates(rank).dp == 0:
                for cut, size in SHARD_BYTES.items():
                    write_weights(Path(root) / _name(model, layout, cut), slots, shapes, writers, size)
    _overwrite_and_cast(rank, Path(root))
    _incomplete(rank, Path(root))


def _overwrite_and_cast(rank: int, root: Path) -> None:
    """A checkpoint in five files is replaced by one in a single file of another dtype, and again by
    a few.
    """
    spec, layout = tiny_spec("qwen3"), LAYOUTS[3]
    slots = make_slots(role_pieces(spec, layout, rank))
    read_weights(root / "qwen3", slots, tensor_shapes(spec))
    for size, dtype in ((20_000, None), (10**9, torch.bfloat16)):
        write_weights(root / "again", slots, tensor_shapes(spec), dist.group.WORLD, size, {"step": "7"}, dtype)
    for size in (10**9, 25_000):
        write_weights(root / "regrown", slots, tensor_shapes(spec), dist.group.WORLD, size)


def _incomplete(rank: int, root: Path) -> None:
    spec = tiny_spec("llama")
    slots = make_slots(role_pieces(spec, LAYOUTS[3], rank))
    kept = [slot for slot in slots if rank < 2 or slot.piece.name != "model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(WeightError, match=r"layers.3.mlp.up_proj.weight: .* do not hold the whole"):
        write_weights(root / "holes", kept, tensor_shapes(spec), dist.group.WORLD)


def _load(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def _assert_same(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    found = _load(directory)
    assert found.keys() == expected.keys(), directory
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), (directory, name)


def _assert_files_in_order(directory: Path, names: list[str], max_shard_bytes: int) -> None:
    """The index lists the model's tensors in its own order, over files of no more than the size
    asked for.
    """
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == names
    files = list(dict.fromkeys(index["weight_map"].values()))
    assert files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert {file.name for file in directory.iterdir()} == {*files, "model.safetensors.index.json"}
    sizes = [[tensor.nbytes for tensor in load_file(directory / file).values()] for file in files]
    assert all(sum(size) <= max_shard_bytes or len(size) == 1 for size in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))


@pytest.mark.timeout(280)
def test_round_trip_is_equal_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(11)
    for model in MODELS:
        theirs = AutoModelForCausalLM.from_config(tiny_config(model)).to(DTYPES.get(model, torch.float32))
        theirs.save_pretrained(tmp_path / model)
    run_ranks(4, _body, str(tmp_path))
    for model in MODELS:
        expected, names = load_file(tmp_path / model / "model.safetensors"), list(tensor_shapes(tiny_spec(model)))
        for layout in LAYOUTS:
            for cut, size in SHARD_BYTES.items():
                directory = tmp_path / _name(model, layout, cut)
                _assert_same(directory, expected)
                if cut != "whole":
                    _assert_files_in_order(directory, names, size)
    _check_transformers_reads_it(tmp_path, "qwen2_tied")
    again = load_file(tmp_path / "qwen3" / "model.safetensors")
    assert [file.name for file in (tmp_path / "again").iterdir()] == ["model.safetensors"]
    _assert_same(tmp_path / "again", {name: tensor.to(torch.bfloat16) for name, tensor in again.items()})
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt", "step": "7"}
    _assert_same(tmp_path / "regrown", again)
    assert not list((tmp_path / "holes").iterdir())


def _check_transformers_reads_it(root: Path, model: str) -> None:
    directory = root / _name(model, LAYOUTS[3], "many")
    tiny_config(model).save_pretrained(directory)
    ours, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    theirs = AutoModelForCausalLM.from_pretrained(root / model).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())
