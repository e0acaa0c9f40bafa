"""What is found in a directory of weights equals what transformers finds, or is refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mrlhf.config import SFTConfig
from mrlhf.errors import ConfigError, WeightError
from mrlhf.models.families import load_spec
from mrlhf.models.parameters import role_pieces
from mrlhf.models.weight_files import check_weight_files, head_bias, read_model
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.preflight import check_models
from mrlhf.weights.stored import INDEX, SINGLE
from tests.shards import full_tensors, make_slots, stored, tiny_config, tiny_spec
from tests.unit.configurations import ppo, supervised

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


def _model(directory: Path, model: str = "llama", head: Any = "lm", **changes: Any) -> Tensors:
    """Write a tiny model as one file; returns its tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads(tiny_config(model).to_json_string(use_diff=False))
    config |= {"max_position_embeddings": 256, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = full_tensors(tiny_spec(model, head))
    _save(directory, tensors)
    return tensors


def _save(directory: Path, tensors: Tensors, file: str = SINGLE) -> None:
    save_file(tensors, directory / file, metadata={"format": "pt"})


def _save_shards(directory: Path, *shards: Tensors) -> None:
    """Write the tensors as several files with an index, as transformers names them."""
    (directory / SINGLE).unlink(missing_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(directory, tensors, file)
        weight_map.update(dict.fromkeys(tensors, file))
    content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(content))


def _ours(directory: Path) -> Tensors:
    """The tensors of the language model in `directory`, as we read them."""
    spec = load_spec(directory, "lm")
    check_weight_files(directory, spec, needs_head=False)
    slots = make_slots(role_pieces(spec, ParallelLayout(tp=1, pp=1, dp=1), 0))
    read_model(directory, spec, slots, needs_head=False)
    return {slot.piece.name: stored(slot) for slot in slots}


def _theirs(directory: Path, dtype: torch.dtype | str) -> Tensors:
    """The same, as transformers reads them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    tensors = dict(model.state_dict())
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del tensors[OUTPUT]
    return tensors


def _assert_read_alike(directory: Path, dtype: torch.dtype | str = torch.float32) -> None:
    ours = _ours(directory)
    theirs = _theirs(directory, dtype)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].to(tensor.dtype), tensor), name


def _refusal(directory: Path, head: Any = "lm", needs_head: bool = False) -> str:
    """The one line in which checking and reading refuse the directory alike."""
    spec = load_spec(directory, head)
    with pytest.raises(WeightError) as checked:
        check_weight_files(directory, spec, needs_head)
    with pytest.raises(WeightError) as read:
        read_model(directory, spec, [], needs_head)
    assert str(checked.value) == str(read.value) and "\n" not in str(read.value)
    return str(read.value)


def _single_beside_an_index(directory: Path, tensors: Tensors) -> None:
    _save_shards(directory, {name: tensor + 1 for name, tensor in tensors.items()})
    _save(directory, tensors)


def _in_two_shards(directory: Path, tensors: Tensors) -> None:
    """The index names the first file for a tensor that the second one holds too."""
    _save_shards(directory, tensors, {NORM: tensors[NORM] + 1})
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][NORM] = "model-00001-of-00002.safetensors"
    (directory / INDEX).write_text(json.dumps(index))


def _unlisted_by_the_index(directory: Path, tensors: Tensors) -> None:
    _save_shards(directory, tensors)
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"][NORM]
    (directory / INDEX).write_text(json.dumps(index))


def _without_prefix(directory: Path, tensors: Tensors) -> None:
    _save(directory, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})


def _with_more_prefix(directory: Path, tensors: Tensors) -> None:
    _save(directory, {f"model.{name}": tensor for name, tensor in tensors.items()})


def _of_other_formats(directory: Path, tensors: Tensors) -> None:
    formats = (torch.float64, torch.float16, torch.bfloat16, torch.float32)
    mixed = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        mixed[name] = tensor.to(formats[number % 4])
    _save(directory, mixed)
    (directory / "pytorch_model.bin").write_bytes(b"older weights, which nobody reads")


def _with_old_buffers(directory: Path, tensors: Tensors) -> None:
    _save(directory, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})


@pytest.mark.parametrize(
    "arrange",
    [
        _single_beside_an_index,
        _in_two_shards,
        _unlisted_by_the_index,
        _without_prefix,
        _with_more_prefix,
        _of_other_formats,
        _with_old_buffers,
    ],
)
def test_odd_directories_are_read_as_transformers_reads_them(
    arrange: Callable[[Path, Tensors], None], tmp_path: Path
) -> None:
    arrange(tmp_path, _model(tmp_path))
    _assert_read_alike(tmp_path)


@pytest.mark.parametrize("case", ["other", "copy", "rounded copy", "output alone", "other rows"])
def test_tied_embeddings_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    tensors = _model(tmp_path, "llama_tied", **{"dtype": "bfloat16"} if "round" in case else {})
    output = tensors[EMBEDDING].clone()
    if case == "other":
        output[36, 31] += 1
    elif case == "rounded copy":  # transformers compares them in the dtype of config.json
        output = output.to(torch.bfloat16).to(torch.float32)
        assert not torch.equal(output, tensors[EMBEDDING])
    elif case == "output alone":
        del tensors[EMBEDDING]
    elif case == "other rows":
        output = output[:36].clone()
    _save(tmp_path, {**tensors, OUTPUT: output})

    spec = load_spec(tmp_path, "lm")
    assert spec.tied_embeddings == (case not in ("other", "other rows"))
    assert spec.hf_config["tie_word_embeddings"] == spec.tied_embeddings
    if case == "other rows":
        assert "lm_head.weight is [36, 32] and not [37, 32]" in _refusal(tmp_path)
        return

    _assert_read_alike(tmp_path, "auto")
    remarks = check_weight_files(tmp_path, spec, needs_head=False)
    assert [("differs from the embedding" in remark) for remark in remarks] == (
        [True] if case == "other" else []
    )


def test_tensors_in_two_files_are_one_remark(tmp_path: Path) -> None:
    tensors = _model(tmp_path)
    (tmp_path / SINGLE).unlink()
    _save_shards(tmp_path, tensors, {name: tensors[name] for name in (OUTPUT, EMBEDDING, NORM)})
    assert check_weight_files(tmp_path, load_spec(tmp_path, "lm"), needs_head=False) == (
        f"{tmp_path}: {OUTPUT} is in model-00001-of-00002.safetensors and in "
        "model-00002-of-00002.safetensors, and 2 more tensors are in two files; the latter is "
        "read, as by transformers",
    )


LFS_POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


def _write_header(file: Path, header: Any, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _unreadable(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_pipe, "a pipe or a device; copy a file"),
        (_truncated, "not readable: "),
        (_unreadable, "not readable: "),
        (lambda file: file.write_bytes(b""), "not readable: "),
        (lambda file: file.write_bytes(b"garbage" * 999), "not readable: "),
        (lambda file: file.write_text(LFS_POINTER), "a Git LFS pointer and not the file itself"),
        (lambda file: _write_header(file, {"a": 1}), "not readable: "),
        (lambda file: _write_header(file, {}), "no tensor model.embed_tokens.weight"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(damage: Any, message: str, tmp_path: Path) -> None:
    _model(tmp_path)
    damage(tmp_path / SINGLE)
    refusal = _refusal(tmp_path)
    assert refusal.startswith(str(tmp_path)) and message in refusal
    with pytest.raises(ConfigError) as dry:
        check_models(supervised(SFTConfig, model__path=str(tmp_path)))
    assert str(dry.value) == f"model: {refusal}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "{}", "[" * 5000),
        *('{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": null}'),
        *('{"weight_map": {"a": 3}}', '{"weight_map": {"a": "\\u0000"}}'),
    ],
)
def test_a_broken_index_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    _model(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / INDEX).write_text(text)
    assert _refusal(tmp_path).startswith(f"{tmp_path / INDEX}: ")


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is there, but only safetensors are read"),
        ("model.gguf", "model.gguf is there, but only safetensors are read"),
        ("model-00001-of-00002.safetensors", "is there without model.safetensors.index.json"),
    ],
)
def test_other_files_are_named(rename: str, message: str, tmp_path: Path) -> None:
    _model(tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / rename)
    assert message in _refusal(tmp_path)


def test_adapters_missing_shards_and_two_of_a_name_are_refused(tmp_path: Path) -> None:
    tensors = _model(tmp_path)
    _save(tmp_path, {**tensors, "norm.weight": tensors[NORM] + 1})
    assert "model.norm.weight and norm.weight are both the model's" in _refusal(tmp_path)

    _save_shards(tmp_path, tensors, {})
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "names model-00001-of-00002.safetensors, which is not there" in _refusal(tmp_path)

    (tmp_path / "adapter_config.json").write_text("{}")
    assert "give the base model as path, and this directory as lora.path" in _refusal(tmp_path)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.bool]
)
def test_quantised_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = _model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    _save(tmp_path, {**tensors, name: torch.zeros_like(tensors[name]).to(dtype)})
    assert f"{name} is of type " in _refusal(tmp_path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "no score.weight, so the model cannot score; give a LlamaForSequenceClassification"),
        ({"v_head.weight": torch.ones(1, 32)}, "cannot score; v_head.weight is no head that tran"),
        ({"classifier.weight": torch.ones(2, 32)}, "classifier.weight is no head that transform"),
        (
            {"score.weight": torch.ones(2, 32)},
            "score.weight is [2, 32] and not [1, 32]; config.json",
        ),
    ],
)
def test_a_reward_model_needs_its_head(extra: Tensors, message: str, tmp_path: Path) -> None:
    tensors = _model(tmp_path)
    _save(tmp_path, tensors | extra)
    assert message in _refusal(tmp_path, "scalar", needs_head=True)

    config = ppo(
        actor__path=str(tmp_path),
        algorithm__adv_estimator="grpo",
        reward_model={"path": str(tmp_path), "micro_batch_tokens": 512},
        reward__terms=[{"name": "reward_model"}],
    )
    if not extra:  # a critic may begin without a head
        check_weight_files(tmp_path, load_spec(tmp_path, "scalar"), needs_head=False)
        with pytest.raises(ConfigError, match=r"^reward_model: .*no score.weight"):
            check_models(config)


def test_the_bias_of_a_reward_models_head_is_read_and_a_critic_has_none(tmp_path: Path) -> None:
    head = {"score.weight": torch.ones(1, 32), "score.bias": torch.tensor([0.75])}
    _save(tmp_path, _model(tmp_path) | head)
    check_weight_files(tmp_path, load_spec(tmp_path, "scalar"), needs_head=True)
    assert head_bias(tmp_path).tolist() == [0.75]
    refusal = _refusal(tmp_path, "scalar", needs_head=False)
    assert "the model has no place for tensor score.bias" in refusal


def test_models_are_checked_with_their_weights_before_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sft = supervised(SFTConfig, model__path=str(tmp_path), data__max_length=32)
    tensors = _model(tmp_path, "llama_tied")
    _save(tmp_path, {**tensors, OUTPUT: tensors[EMBEDDING] + 1})
    assert check_models(sft, need_weights=True)["model"] == load_spec(tmp_path, "lm")
    assert len(caplog.messages) == 1 and "they are kept apart" in caplog.messages[0]

    (tmp_path / SINGLE).unlink()
    check_models(sft)  # a machine without the weights
    with pytest.raises(ConfigError, match=r"^model: .*neither model.safetensors nor"):
        check_models(sft, need_weights=True)
    drawn = supervised(SFTConfig, model__path=str(tmp_path), model__init="random")
    check_models(drawn, need_weights=True)
