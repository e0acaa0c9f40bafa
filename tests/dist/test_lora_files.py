"""Adapters in files: peft's are read, what is written is what peft loads, and merges agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrlhf.config.sections import ActorSection, LoraSection
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.run.export import ExportedModel, export_result
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import CPU
from tests.models.checkpoints import convert_quietly
from tests.models.mixtures import mixture_configs
from tests.oracle.plain_lora import ALPHA, RANK, adapt, adapter_of, save_adapter
from tests.oracle.plain_models import EAGER, MODELS, SIZES, load, save_models
from tests.ranks import run_ranks
from tests.tiny_task import write_tiny_task

LAYOUTS = {"tp1": AxisSizes(), "tp2": AxisSizes(tp=2)}
# How peft itself makes more adapters, by name: the model, and its settings.
MADE_BY_PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 6,
            "use_rslora": True,
            "target_modules": r".*\.(q_proj|k_proj|up_proj|down_proj)",
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 3},
            "alpha_pattern": {"k_proj": 9},
        },
    ),
    "some layers": (
        "qwen3",
        {
            "target_modules": ["q_proj", "v_proj", "gate_proj"],
            "exclude_modules": ["v_proj"],
            "layers_to_transform": [1],
        },
    ),
    "attention": ("qwen3-moe", {"target_modules": ["q_proj", "o_proj"]}),
    "stacks": (
        "gpt-oss",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"],
            "rank_pattern": {r"mlp\.experts\.gate_up_proj": 2, "q_proj": 3},
            "alpha_pattern": {r"layers\.1\.mlp\.experts\.gate_up_proj": 5},
        },
    ),
    "stacks beside a dense MLP": (
        "gemma4-moe",
        {
            "target_modules": ["q_proj", "mlp.down_proj", "router.proj"],
            "target_parameters": ["experts.gate_up_proj", "0.experts.down_proj"],
            "rank_pattern": {r"experts\.gate_up_proj": 2, r"mlp\.down_proj": 3},
            "alpha_pattern": {r"layers\.1\.experts\.gate_up_proj": 5},
        },
    ),
    "head": (
        "llama-critic",
        {"task_type": "SEQ_CLS", "target_modules": ["q_proj"], "modules_to_save": ["score"]},
    ),
}
# Adapters of mixtures in which layers that peft joins have several scales: by name the model, and
# what matches a layer, with its rank and alpha.
SCALED: dict[str, tuple[str, dict[str, tuple[int, float]]]] = {
    "alphas": ("qwen3-moe", {r"up_proj": (RANK, 9.0)}),
    "ranks": ("qwen3-moe", {r"up_proj": (2, ALPHA), r"q_proj": (1, 3.0)}),
    "experts": ("mixtral", {r".*\.w1": (RANK, 1.0), r"experts.*w2": (2, 7.0)}),
}
PLAIN = (*MODELS, "mixtral", "qwen3-moe-rslora")


def _adapters(root: Path) -> dict[str, tuple[Path, Path]]:
    """The model and the adapter of each case."""
    cases = {name: (root / name, adapter_of(root / name)) for name in PLAIN}
    cases["qwen3-moe-rslora"] = (root / "qwen3-moe", adapter_of(root / "qwen3-moe-rslora"))
    for name, (model, _) in MADE_BY_PEFT.items():
        cases[name] = (root / model, root / f"{name}-adapter")
    for name, (model, _) in SCALED.items():
        cases[name] = (root / model, root / f"{name}-adapter")
    return cases


def _save_all(root: Path) -> None:
    save_models(root)
    write_tiny_task(root / "data")
    torch.manual_seed(3)
    for name in ("gemma4-moe", "mixtral"):
        config = mixture_configs(SIZES)[name]
        made = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
        made.save_pretrained(root / name)
    save_adapter(made, adapter_of(root / "mixtral"), torch.Generator().manual_seed(7))

    qwen = load(root / "qwen3-moe")
    stabilised = adapter_of(root / "qwen3-moe-rslora")
    save_adapter(qwen, stabilised, torch.Generator().manual_seed(9))
    file = stabilised / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))

    for name, (model, settings) in MADE_BY_PEFT.items():
        adapted = get_peft_model(load(root / model), LoraConfig(**settings))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(root / f"{name}-adapter")
    for name in SCALED:
        _save_scaled(root, name)


def _save_scaled(root: Path, name: str) -> None:
    """Write an adapter with patterns; and one of the same model without any, as an oracle."""
    model, patterns = SCALED[name]
    source = adapter_of(root / model)
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    plain = {}
    for tensor, values in tensors.items():
        layer = tensor.rpartition(".lora_")[0]
        fits = [
            pair for pattern, pair in patterns.items() if re.fullmatch(f".*\\.{pattern}", layer)
        ]
        rank, alpha = fits[0] if fits else (RANK, ALPHA)
        is_first = ".lora_A." in tensor
        tensors[tensor] = values[:rank] if is_first else values[:, :rank].contiguous()
        plain[tensor] = tensors[tensor] * (1.0 if is_first else alpha / rank * RANK / ALPHA)

    ranks = {pattern: rank for pattern, (rank, _) in patterns.items()}
    alphas = {pattern: alpha for pattern, (_, alpha) in patterns.items()}
    written = {
        "": (tensors, {"rank_pattern": ranks, "alpha_pattern": alphas}),
        "-plain": (plain, {}),
    }
    for ending, (factors, settings) in written.items():
        directory = root / f"{name}{ending}-adapter"
        directory.mkdir()
        save_file(factors, directory / "adapter_model.safetensors", {"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps(config | settings))


def _export(rank: int, world_size: int, root: Path) -> None:
    factory = GroupFactory(timeout_s=600.0)
    tokenizer = load_tokenizer(str(root / "data" / "tokenizer"), None)
    for layout, sizes in LAYOUTS.items():
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, sizes))
        for name, (model, adapter) in _adapters(root).items():
            section = ActorSection(
                path=str(model),
                dtype="float32",
                lora=LoraSection(path=str(adapter)),
                tp=sizes.tp,
            )
            head = "scalar" if model.name.endswith("-critic") else "lm"

            engine = ModelEngine(section, spec_of_role(section, head), groups, CPU)
            engine.load(model, seed=0)
            exported = ExportedModel(engine, tokenizer, 1, also_merged=True)
            export_result(exported, root / layout / name, 1, lambda: None)
            dist.barrier()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    _save_all(root)
    run_ranks(2, _export, root)
    return root


def _logits(model: Any) -> Tensor:
    """In float64, so that the order of operations is not seen."""
    tokens = torch.randint(67, (1, 18), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: Tensor = model.double().eval()(tokens).logits
    return logits


@pytest.mark.parametrize("name", [*PLAIN, *MADE_BY_PEFT])
def test_a_round_trip_keeps_every_bit_and_peft_computes_the_same(root: Path, name: str) -> None:
    model, adapter = _adapters(root)[name]
    wanted = load_file(adapter / "adapter_model.safetensors")
    for layout in LAYOUTS:
        exported = root / layout / name
        found = load_file(exported / "adapter_model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted)
        assert (exported / "tokenizer.json").is_file()
        assert not (exported / "config.json").exists()
        config = json.loads((exported / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(model)

    oracle = load(model, adapted=True) if name in MODELS else None
    if name in MADE_BY_PEFT or name == "mixtral":
        oracle = PeftModel.from_pretrained(load(model), adapter)
    theirs = PeftModel.from_pretrained(load(model), root / "tp1" / name)
    merged = _logits(_load_merged(root / "tp1" / f"{name}_merged", model))
    logits = _logits(theirs)
    assert (logits - _logits(load(model))).abs().max() > 0.01
    torch.testing.assert_close(merged, logits, rtol=0, atol=1e-5)
    if oracle is not None:
        torch.testing.assert_close(logits, _logits(oracle), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SCALED)
def test_layers_that_peft_joins_may_have_several_scales(
    root: Path, tmp_path: Path, name: str
) -> None:
    """As its base plus the factors says, so do peft, a merge, and a merge of the export."""
    model, _ = _adapters(root)[name]
    oracle = load(model)
    adapt(oracle, root / f"{name}-plain-adapter")
    wanted = _logits(oracle)
    found = {"merged": _load_merged(root / "tp1" / f"{name}_merged", model)}
    for layout in LAYOUTS:
        exported = root / layout / name
        found[layout] = PeftModel.from_pretrained(load(model), exported)
        convert_quietly(exported, tmp_path / layout, merge=True, base=model)
        found[f"{layout} merged"] = _load_merged(tmp_path / layout, model)
    for how, theirs in found.items():
        difference = float((_logits(theirs) - wanted).abs().max())
        assert difference < 1e-5, (how, difference)


def _load_merged(path: Path, model: Path) -> Any:
    """The merged checkpoint as transformers' model."""
    auto = transformers.AutoModelForCausalLM
    if model.name.endswith("-critic"):
        auto = transformers.AutoModelForSequenceClassification
    loaded, told = auto.from_pretrained(path, output_loading_info=True, **EAGER)
    assert not any(told.values()), told
    return loaded


@pytest.mark.parametrize("name", [*PLAIN, *MADE_BY_PEFT])
def test_all_ways_to_merge_agree(root: Path, tmp_path: Path, name: str) -> None:
    model, adapter = _adapters(root)[name]
    convert_quietly(adapter, tmp_path / "merged", merge=True, base=model)
    wanted = _load_merged(tmp_path / "merged", model).state_dict()
    found = [_load_merged(root / layout / f"{name}_merged", model) for layout in LAYOUTS]
    states = [each.state_dict() for each in found]
    peft = PeftModel.from_pretrained(load(model), root / "tp1" / name)
    states.append(peft.merge_and_unload().state_dict())
    for state in states:
        for tensor, values in wanted.items():
            torch.testing.assert_close(state[tensor], values, rtol=1e-6, atol=1e-6)


def test_transformers_loads_base_and_adapter_from_the_export(root: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(root / "tp1" / "llama", **EAGER)
    wanted = PeftModel.from_pretrained(load(root / "llama"), adapter_of(root / "llama"))
    torch.testing.assert_close(_logits(loaded), _logits(wanted), rtol=0, atol=1e-6)
