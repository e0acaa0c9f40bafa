"""Adapters that are not plain LoRA, or not of the base, are refused in one line, by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from mrlhf.checkpoint.frozen import fingerprint
from mrlhf.commands.convert_checkpoint import main
from mrlhf.config.sections import LoraSection
from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.inputs.paths import absent_paths
from mrlhf.models.adapter_choice import with_lora
from mrlhf.models.adapter_files import check_adapter
from mrlhf.models.families import load_spec
from mrlhf.preflight import check_models, dry_run
from mrlhf.preflight.output import check_output
from mrlhf.run.same_start import describe_start
from tests.oracle.plain_lora import PREFIX, adapter_of
from tests.oracle.plain_models import load, save_models
from tests.unit.configurations import ppo

SHORT = {"data__max_prompt_length": 8, "data__max_response_length": 8}
LAYER = f"{PREFIX}model.layers.0.self_attn.q_proj"
EXPERT = r"layers\.0\.mlp\.experts\.1\.gate_proj"
BROKEN = ("(q_proj", "[", "*", "q_proj\\", "[\n")
ENDLESS = (
    "(a+)+b",
    r"(.*)*x",
    r"(\w|\w)*!",
    r"(.*\.){30}x",
    r".*.*.*.*.*.*.*=x",
    "(_|_)" * 30 + "x",
    "m?" * 40 + "x",
)
# Numbers that scale no layer, and regular expressions that cannot be used.
BAD: list[tuple[str, Any]] = [
    *(("r", value) for value in (0, -1, 2.5, "8", True, math.nan, 2**70)),
    *(("lora_alpha", value) for value in (0, -16, math.nan, math.inf, "16", True)),
    *(("lora_dropout", value) for value in (1, -0.1, math.nan, "0.1")),
    *(("use_rslora", value) for value in ("false", "yes", 0, 1)),
    *(("rank_pattern", {"q_proj": value}) for value in (0, -1, math.nan, "2", None)),
    *(("alpha_pattern", {"q_proj": value}) for value in (0, -1, math.inf, "2", None)),
    *(("rank_pattern", value) for value in (3, ["q_proj"], "q_proj")),
    *(("rank_pattern", {pattern: 2}) for pattern in (*BROKEN, "(?i)q_proj")),
    *(("alpha_pattern", {pattern: 2.0}) for pattern in ENDLESS),
    *(("target_modules", value) for value in (3, [1], *BROKEN)),
    *(("exclude_modules", value) for value in (True, *BROKEN)),
    ("modules_to_save", [["score"]]),
    ("base_model_name_or_path", 7),
    ("init_lora_weights", "pissa_niter_4"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_models(path)
    return path


def _refusal(model: Path, adapter: Path) -> str:
    spec = load_spec(model, "lm")
    with pytest.raises(MrlhfError) as refusal:
        check_adapter(adapter, with_lora(spec, LoraSection(path=str(adapter))))
    message = str(refusal.value)
    assert "\n" not in message and str(adapter) in message
    return message


def _copy(
    source: Path,
    target: Path,
    config: dict[str, Any],
    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> Path:
    target.mkdir()
    stored = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(stored | config))
    changed = tensors(load_file(source / "adapter_model.safetensors"))
    save_file(changed, target / "adapter_model.safetensors")
    return target


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        ("llama", {"use_dora": True}, ("use_dora is True", "plain LoRA")),
        ("llama", {"peft_type": "LOHA"}, ("peft_type is 'LOHA'",)),
        ("llama", {"bias": "all"}, ("bias is 'all'",)),
        ("llama", {"r": None}, ("'r' is missing",)),
        *(("llama", {key: value}, (key,)) for key, value in BAD),
        ("qwen3-moe", {"rank_pattern": {EXPERT: 2}}, ("experts.0.gate_proj", "experts.1.gate_pro")),
        ("qwen3-moe", {"alpha_pattern": {EXPERT: 2}}, ("differ in rank or scale",)),
    ],
)
def test_other_settings_of_peft(
    root: Path, tmp_path: Path, model: str, config: dict[str, Any], words: tuple[str, ...]
) -> None:
    adapter = _copy(adapter_of(root / model), tmp_path / "adapter", config, dict)
    message = _refusal(root / model, adapter)
    assert all(word in message for word in words), message


def _without_an_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".experts.2.up_proj" not in name}


def _with(name: str, columns: int = 32) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.ones(3, columns)}


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("llama", _with(f"{LAYER}.lora_A.weight"), ()),
        ("llama", _with(f"{PREFIX}lm_head.lora_A.weight"), ("lm_head", "no such linear layer")),
        ("llama", _with(f"{PREFIX}model.norm.weight"), ("no place for tensor", "norm")),
        ("llama", lambda tensors: {f"{LAYER}.lora_A.weight": torch.ones(3, 32)}, ("lora_B",)),
        ("llama", _with(f"{LAYER}.lora_A.weight", 31), ("[3, 31] and not [3, 32]",)),
        ("qwen3-moe", _without_an_expert, ("experts.2.up_proj", "only one has an adapter")),
    ],
)
def test_other_tensors(
    root: Path, tmp_path: Path, model: str, change: Any, words: tuple[str, ...]
) -> None:
    adapter = _copy(adapter_of(root / model), tmp_path / "adapter", {}, change)
    if not words:  # the change changes nothing
        check_adapter(
            adapter, with_lora(load_spec(root / model, "lm"), LoraSection(path=str(adapter)))
        )
        return
    message = _refusal(root / model, adapter)
    assert all(word in message for word in words), message


def test_an_adapter_of_another_base(root: Path) -> None:
    assert "qkv_proj" in _refusal(root / "llama", adapter_of(root / "phi3"))
    message = _refusal(root / "llama", adapter_of(root / "olmo2"))  # it has more layers
    assert "layers.2." in message and "no such linear layer" in message


def test_patterns_that_end_are_taken(root: Path, tmp_path: Path) -> None:
    patterns = {
        r"^model\.layers\.0\.mlp\.up_proj": 3,
        r".*layers\.(0|1)\..*(q|k)_proj": 3,
        r"layers\.[0-9]+\.self_attn\.(?:v|o)_proj": 3,
    }
    config = {"rank_pattern": patterns, "r": 3, "target_modules": r"(?i)(.*\.)*(q_proj|o_proj)"}
    adapter = _copy(adapter_of(root / "llama"), tmp_path / "adapter", config, dict)
    spec = with_lora(load_spec(root / "llama", "lm"), LoraSection(path=str(adapter)))
    assert spec.lora is not None and dict(spec.lora.ranks) == patterns


def test_the_base_that_an_adapter_names_is_the_one_of_the_run(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(root / "llama", other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors")
    copy = tmp_path / "copy"
    shutil.copytree(root / "llama", copy)

    def check(number: int, base: str) -> None:
        config = {"base_model_name_or_path": base}
        adapter = _copy(adapter_of(root / "llama"), tmp_path / f"{number}", config, dict)
        layout = {"tp": 1, "pp": 1}
        lora = {"path": str(adapter)}
        keys = {"path": str(root / "llama"), "micro_batch_tokens": 512, "lora": lora, **layout}
        check_models(ppo(actor=keys, critic=layout, rollout__tp=1, **SHORT), need_weights=True)

    for number, base in enumerate((str(root / "llama"), str(copy), "meta/llama", "")):
        check(number, base)
    assert not caplog.text
    check(8, "someone/qwen")
    assert "'someone/qwen'" in caplog.text and str(root / "llama") in caplog.text
    with pytest.raises(ConfigError, match="holds other weights than") as refusal:
        check(9, str(other))
    assert str(other) in str(refusal.value) and "\n" not in str(refusal.value)

    merge = [str(tmp_path / "9"), "--merge", "--base", str(root / "llama"), "--to", "huggingface"]
    assert main([*merge, "--out", str(tmp_path / "merged")]) == 2
    assert not (tmp_path / "merged").exists()


def test_an_adapter_is_found_and_protected_as_a_model_is(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    adapter = run / "actor"
    run.mkdir()
    shutil.copytree(adapter_of(root / "llama"), adapter)
    model = str(root / "llama")
    for role in ("actor", "critic"):
        keys = {"actor__path": model, f"{role}__lora": {"path": str(adapter)}}
        for output, words in ((run, "overwrite"), (adapter, "is the directory")):
            with pytest.raises(ConfigError, match=f"{words} .*{role}.lora.path {adapter}"):
                check_output(ppo(**keys, trainer__output_dir=str(output)))
        check_output(ppo(**keys, trainer__output_dir=str(tmp_path)))

        absent = {"actor__path": model, f"{role}__lora": {"path": "nowhere"}, **SHORT}
        missing = dry_run(ppo(**absent), 8).missing
        assert any(line.startswith(f"{role}.lora.path nowhere does not exist") for line in missing)
        with pytest.raises(ConfigError, match=f"{role}.lora.path .* holds no adapter_config.json"):
            absent_paths(ppo(actor__path=model, **{f"{role}__lora": {"path": model}}))
    with pytest.raises(ConfigError, match=r"actor\.tp 8 does not fit"):
        dry_run(ppo(**absent | {"actor__tp": 8, "actor__lora": {"path": "nowhere"}}), 16)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_each_bit_of_an_adapter_counts(root: Path, tmp_path: Path, file: str) -> None:
    """Between ranks and between two starts, in the middle of a large file too."""
    adapter = _copy(
        adapter_of(root / "llama"),
        tmp_path / "adapter",
        {"note": "x" * 2**18},
        lambda tensors: tensors | {"zeros": torch.zeros(2**17)},
    )

    def known_by() -> list[object]:
        return [describe_start(ppo(), [("actor.lora.path", str(adapter))]), fingerprint(adapter)]

    before = known_by()
    assert before == known_by()
    content = bytearray((adapter / file).read_bytes())
    content[len(content) // 2] ^= 1
    (adapter / file).write_bytes(content)
    assert all(one != other for one, other in zip(before, known_by(), strict=True))


def test_experts_that_peft_has_joined(root: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj"])
    get_peft_model(load(root / "qwen3-moe"), config).save_pretrained(tmp_path / "adapter")
    message = _refusal(root / "qwen3-moe", tmp_path / "adapter")
    assert "all experts of a layer at once" in message and "transformers 5" in message


def test_the_converter_takes_an_adapter_with_merge_alone(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = adapter_of(root / "llama")
    command = ["--to", "huggingface", "--out", str(tmp_path / "out")]
    for arguments, words in (
        ([str(adapter)], ("is an adapter", "--merge")),
        ([str(adapter), "--merge"], ("base of the adapter", "--base")),
        ([str(root / "llama"), "--merge"], ("--merge has no meaning",)),
        ([str(adapter), "--merge", "--base", str(root / "phi3")], ("no such linear layer",)),
    ):
        assert main([*arguments, *command]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words), error

    assert main([str(adapter), "--merge", "--base", str(root / "llama"), *command]) == 0
    assert "adapter, merged into" in capsys.readouterr().out


def test_a_merged_classifier_has_the_labels_of_its_adapters_head(
    root: Path, tmp_path: Path
) -> None:
    base = root / "llama"
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    config = LoraConfig(
        task_type="SEQ_CLS", r=2, init_lora_weights=False, target_modules=["q_proj"]
    )
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    command = [str(tmp_path / "adapter"), "--merge", "--base", str(base), "--to", "huggingface"]
    assert main([*command, "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    tokens = torch.tensor([[5, 9, 11]])
    wanted = adapted(tokens).logits
    assert wanted.std() > 0.01
    torch.testing.assert_close(merged(tokens).logits, wanted, rtol=1e-5, atol=1e-6)


def test_a_merge_rounds_once(root: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    load(root / "llama").to(torch.bfloat16).save_pretrained(base)
    adapter = adapter_of(root / "llama")
    for dtype in ("float32", None):
        command = [str(adapter), "--merge", "--base", str(base), "--to", "huggingface"]
        chosen = [] if dtype is None else ["--dtype", dtype]
        assert main([*command, *chosen, "--out", str(tmp_path / f"{dtype}")]) == 0
    exact = load_file(tmp_path / "float32" / "model.safetensors")
    rounded = load_file(tmp_path / "None" / "model.safetensors")
    for name, tensor in exact.items():
        assert torch.equal(rounded[name], tensor.to(torch.bfloat16)), name
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(exact[name], rounded[name].float())
