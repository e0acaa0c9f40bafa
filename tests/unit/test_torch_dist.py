"""Reading what others pickled runs none of their code, and no key of Megatron-LM's goes missing."""

from __future__ import annotations

import argparse
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from mrlhf.checkpoint.conversion.megatron_arguments import (
    MEGATRON_FAMILIES,
    arguments_of,
    config_of,
)
from mrlhf.checkpoint.conversion.megatron_names import find_homes
from mrlhf.checkpoint.conversion.megatron_reader import MegatronSource, find_folder, read_common
from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.checkpoint.conversion.torch_dist import TorchDistReader, TorchDistWriter
from mrlhf.checkpoint.tensor_file import TensorFile
from mrlhf.errors import CheckpointError
from mrlhf.models.families import FAMILIES, spec_of
from mrlhf.weights.boxes import Box
from tests.models.checkpoints import convert_quietly, save_model
from tests.models.engines import hf_model
from tests.models.engines import spec_of as spec_of_model
from tests.models.features import FEATURE_MODELS
from tests.shards import tiny_spec


class _Touch:
    """Makes a file when it is unpickled by an ordinary reader."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Megatron-LM checkpoint, to be damaged."""
    save_model("llama", tmp_path / "hf")
    convert_quietly(tmp_path / "hf", tmp_path / "megatron", "megatron")
    return tmp_path / "megatron" / "release"


def _open(checkpoint: Path, **options: Any) -> MegatronSource:
    folder = find_folder(checkpoint)
    assert folder is not None
    return MegatronSource(folder, **options)


def _change_index(checkpoint: Path, change: Any) -> None:
    file = checkpoint / ".metadata"
    index: Metadata = pickle.loads(file.read_bytes())
    change(index)
    file.write_bytes(pickle.dumps(index))


def test_code_in_the_index_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Touch(touched)))
    pickle.loads(pickle.dumps(_Touch(tmp_path / "control")))
    assert (tmp_path / "control").exists(), "the attack is none"

    with pytest.raises(CheckpointError, match="not an index of a checkpoint"):
        _open(checkpoint)
    assert not touched.exists()


def test_code_in_the_arguments_is_not_run_but_named(checkpoint: Path, tmp_path: Path) -> None:
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    common["rerun_state_machine"] = _Touch(tmp_path / "touched")
    common["tensor"] = torch.ones(3)
    torch.save(common, checkpoint / "common.pt")

    source = _open(checkpoint)
    assert not (tmp_path / "touched").exists()
    said = source.description.left_out
    assert "in common.pt: num_floating_point_operations_so_far, rerun_state_machine, tensor" in said
    (unread,) = (text for text in said if text.startswith("unread classes"))
    assert "posix.system" in unread


def test_arguments_that_lie_among_the_weights_are_read(checkpoint: Path, tmp_path: Path) -> None:
    """As megatron-core 0.19 writes them: an object of a list, and no file for them."""
    before = read_common(checkpoint)
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    common["optimizer"] = _Touch(tmp_path / "touched")
    file = checkpoint / "__1_0.distcp"
    file.write_bytes(b"other")
    with file.open("ab") as stream:
        torch.save([common], stream)
    (checkpoint / "common.pt").unlink()

    def move(index: Metadata) -> None:
        name = "common_state/shard_0_1"
        index.state_dict_metadata[name] = BytesStorageMetadata()
        place = _StorageInfo(file.name, 5, file.stat().st_size - 5)
        index.storage_data[MetadataIndex(name)] = place

    _change_index(checkpoint, move)
    found = read_common(checkpoint)
    assert found.arguments == before.arguments and found.iteration == before.iteration
    assert found.refused == ["posix.system"] and not (tmp_path / "touched").exists()
    assert _open(checkpoint).tensors

    file.write_bytes(b"other")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: not readable"):
        read_common(checkpoint)


def test_code_among_the_weights_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    """In the place of a tensor stands a pickle of the same length."""
    (file,) = checkpoint.glob("*.distcp")
    reader = TorchDistReader(checkpoint)
    attack = tmp_path / "attack.pt"
    torch.save(_Touch(tmp_path / "touched"), attack)
    content = bytearray(file.read_bytes())
    place = reader._places["embedding.word_embeddings.weight", (0, 0)]
    payload = attack.read_bytes()
    assert len(payload) <= place.length
    content[place.offset : place.offset + len(payload)] = payload
    file.write_bytes(content)

    def shorten(index: Metadata) -> None:
        for key, info in index.storage_data.items():
            if key.fqn == "embedding.word_embeddings.weight" and info.offset == place.offset:
                info.length = len(payload)

    _change_index(checkpoint, shorten)
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight.* is not readable at byte"):
        TorchDistReader(checkpoint).read(Box("embedding.word_embeddings.weight", (0, 0), (37, 32)))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["../__0_0.distcp", "/etc/passwd", "sub/file", "", ".."])
def test_a_file_name_cannot_leave_the_directory(name: str, checkpoint: Path) -> None:
    def move(index: Metadata) -> None:
        key = next(iter(index.storage_data))
        index.storage_data[key] = _StorageInfo(name, 0, 10)

    _change_index(checkpoint, move)
    with pytest.raises(CheckpointError, match="which is not beside it; do not use this checkpoint"):
        _open(checkpoint)


def test_every_key_counts(checkpoint: Path) -> None:
    def rename(old: str, new: str) -> Any:
        def change(index: Metadata) -> None:
            index.state_dict_metadata[new] = index.state_dict_metadata.pop(old)
            for key in list(index.storage_data):
                if key.fqn == old:
                    index.storage_data[replace(key)] = index.storage_data.pop(key)

        return change

    _change_index(checkpoint, rename("output_layer.weight", "output_layer.bias"))
    with pytest.raises(CheckpointError, match=r"the model has no place for output_layer.bias"):
        _open(checkpoint)
    _change_index(checkpoint, rename("output_layer.bias", "optimizer.state.exp_avg.output_layer"))
    with pytest.raises(
        CheckpointError, match=r"nothing holds lm_head.weight; the checkpoint is no"
    ):
        _open(checkpoint)


def test_a_weight_cannot_be_there_twice_or_in_another_shape() -> None:
    spec = tiny_spec("llama")
    norm = TensorForm((4, 32), torch.float32)
    stored = {"decoder.layers.input_layernorm.weight": norm}
    stored["decoder.layers.self_attention.linear_qkv.layer_norm_weight"] = norm
    with pytest.raises(CheckpointError, match=r"both hold model.layers.0.input_layernorm.weight"):
        find_homes(spec, stored, "it")

    for shape, message in (
        ((5, 32), r"stacks \[5\] layers or experts and the model has \[4\]"),
        ((4, 31), r"is \[31\] and must be \[32\] in this model"),
    ):
        stored = {"decoder.layers.input_layernorm.weight": TensorForm(shape, torch.float32)}
        with pytest.raises(CheckpointError, match=message):
            find_homes(spec, stored, "it")


def test_experts_that_the_model_has_not_are_refused() -> None:
    experts = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    for model, key, shape, message in (
        ("llama", experts, (4, 8, 16, 32), "the model has no place for "),
        ("qwen3_moe", experts, (4, 9, 16, 32), r"stacks \[4, 9\] layers or experts"),
        ("qwen3_moe", "decoder.layers.mlp.router.expert_bias", (4, 8), "has no place for "),
    ):
        spec = tiny_spec(model)
        with pytest.raises(CheckpointError, match=message):
            find_homes(spec, {key: TensorForm(shape, torch.float32)}, "it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'; only 'RMSNorm' has a Hugg"),
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1; only None"),
        ({"swiglu": False}, "swiglu is False; only True"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "has features of qwen2 and qwen3 at once"),
        ({"hidden_size": None}, "do not state hidden_size; give the directory of a Hugging Face"),
    ],
)
def test_what_no_family_has_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = arguments_of(tiny_spec("llama"), vocab_divisible_by=1) | changes
    with pytest.raises(CheckpointError) as refusal:
        config_of(arguments, 37, None)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_ungrouped_queries() -> None:
    """Megatron-LM states one query group where there is no grouping at all."""
    arguments = arguments_of(tiny_spec("llama"), vocab_divisible_by=1)
    arguments |= {"group_query_attention": False, "num_query_groups": 1}
    assert spec_of(config_of(arguments, 37, None), "lm").num_kv_heads == 8


def test_the_given_model_must_be_that_of_the_checkpoint(checkpoint: Path) -> None:
    other = replace(tiny_spec("llama"), num_layers=3)
    with pytest.raises(CheckpointError, match="num_layers is 4 in the checkpoint and 3 there"):
        _open(checkpoint, like=other)


def test_other_formats_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="its format is zarr; save it anew with --ckpt-forma"):
        _open(checkpoint)
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("../../x")
    with pytest.raises(CheckpointError, match=r"says '../../x', which is no iteration"):
        find_folder(checkpoint.parent)
    assert find_folder(tmp_path) is None


def test_a_damaged_common_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "common.pt").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match=r"common.pt: not readable"):
        read_common(checkpoint)


def test_arguments_come_back(tmp_path: Path) -> None:
    arguments = argparse.Namespace(num_layers=4, params_dtype=torch.bfloat16, window_size=(3, 0))
    torch.save({"args": arguments, "iteration": 7}, tmp_path / "common.pt")
    common = read_common(tmp_path)
    assert common.arguments == vars(arguments) and common.iteration == 7
    assert common.others == [] and common.refused == []


def test_boxes_are_put_together(tmp_path: Path) -> None:
    values = torch.arange(24.0).view(4, 6)
    writer = TorchDistWriter(tmp_path, max_file_bytes=1)
    for row in (0, 2):
        for column in (0, 3):
            part = values[row : row + 2, column : column + 3]
            writer.write_box("x", (4, 6), (row, column), part)
    writer.finish({})
    assert len(list(tmp_path.glob("*.distcp"))) == 4

    reader = TorchDistReader(tmp_path)
    assert torch.equal(reader.read(Box("x", (1, 1), (4, 6))), values[1:4, 1:6])
    assert list(reader.problems()) == []

    (tmp_path / "__0_2.distcp").unlink()
    assert list(reader.problems()) == ["__0_2.distcp is missing"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff" * 8, "the header is longer than the file"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "x has 4 bytes and needs 8"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "the file ends before x does"),
        (b'{"x":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}', "is of type F8_E4M3"),
        (b"{", "not readable: Expecting property name"),
    ],
)
def test_a_damaged_safetensors_file_is_refused(header: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    length = len(header).to_bytes(8, "little") if header != b"\xff" * 8 else b""
    file.write_bytes(length + header)
    with pytest.raises(CheckpointError) as refusal:
        TensorFile(file)
    assert message in str(refusal.value) and str(file) in str(refusal.value)


@pytest.mark.parametrize("name", FEATURE_MODELS)
def test_a_model_that_megatron_does_not_describe_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        arguments_of(spec_of_model(hf_model(name)), vocab_divisible_by=1)
    assert "Megatron-LM's arguments do not describe it" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(MEGATRON_FAMILIES)))
def test_a_family_that_megatron_does_not_describe_is_refused(family: str) -> None:
    arguments = arguments_of(tiny_spec("llama"), vocab_divisible_by=1)
    with pytest.raises(CheckpointError, match=f"do not describe a {family} model; known are"):
        config_of(arguments, 37, family)
