"""Conversion between formats in one process: every tensor comes back, and every key counts."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.checkpoint.conversion.convert import SourceOptions, TargetOptions, convert
from mrlhf.checkpoint.conversion.megatron_writer import MegatronOptions
from mrlhf.checkpoint.manifest import checkpoint_name
from mrlhf.commands import convert_checkpoint
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import CheckpointError, DataError, WeightError
from mrlhf.models.families import load_spec
from tests.models.checkpoints import CONFIGS, assert_same_tensors, read_tensors, save_model
from tests.models.training_checkpoints import save_training

ROOT = Path(__file__).parents[2]
TALK = [{"role": "user", "content": "hi"}]


def _meter(told: list[int]) -> Any:
    """Notes the bytes of each task as a negative number, and then those that are done."""

    def start(task: str, nbytes: int) -> Any:
        told.append(-nbytes)
        return told.append

    return start


def _convert(source: Path, target: Path, to: Any, **options: Any) -> list[str]:
    """Convert and verify; returns what was left out, and the notes."""
    told: list[int] = []
    given = options.pop("given", SourceOptions())
    wanted = TargetOptions(format=to, **options)
    report = convert(source, target, given, wanted, verify=True, start=_meter(told))
    assert sum(told) == 0 and len(told) > 40, "progress does not add up"
    return report.left_out + report.notes


def _linear_layers(name: str) -> int:
    """Those for which megatron-core has an extra state, in four transformer layers."""
    with_mixtures = {
        "mixtral": 4 * (2 + 4 * 2),
        "qwen2_moe": 4 * (2 + 4 * 2 + 2),
        "qwen3_moe-tied": 3 * (2 + 8 * 2) + 4,
        "gpt_oss": 4 * (2 + 4 * 2),
        "glm4_moe": 3 * (2 + 8 * 2 + 2) + 4,
        "deepseek_v3": 3 * (5 + 8 * 2 + 2) + 5 + 2,
        "glm4_moe_lite": 3 * (4 + 8 * 2 + 2) + 4 + 2,
        "deepseek_v32": 4 * (5 + 3 + 8 * 2 + 2),
        "glm_moe_dsa": 3 * (5 + 8 * 2 + 2) + 5 + 2 + 3 * 3,
        "qwen3_next": 3 * (2 + 8 * 2 + 2) + 4,
        "qwen3_5_moe_text": 4 * (2 + 8 * 2 + 2),
    }
    return with_mixtures.get(name, 4 * 4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fused_norms", [True, False])
def test_megatron_and_back(name: str, fused_norms: bool, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if "tied" in name else torch.float32
    save_model(name, tmp_path / "hf", dtype)
    form = MegatronOptions(vocab_divisible_by=8, fused_norms=fused_norms)
    options = {"megatron": form, "max_file_bytes": 9000}
    _convert(tmp_path / "hf", tmp_path / "megatron", "megatron", **options)
    assert len(list((tmp_path / "megatron" / "release").glob("*.distcp"))) > 3

    told = _convert(tmp_path / "megatron", tmp_path / "back", "huggingface")
    assert f"{_linear_layers(name)} extra states (8-bit scaling factors, if any)" in told
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    assert load_spec(tmp_path / "back", "lm") == load_spec(tmp_path / "hf", "lm")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_arguments_alone_describe_the_model(name: str, tmp_path: Path) -> None:
    """As for a checkpoint that Megatron-LM wrote, beside which there is no config.json."""
    save_model(name, tmp_path / "hf")
    _convert(tmp_path / "hf", tmp_path / "megatron", "megatron")
    _convert(tmp_path / "megatron" / "release", tmp_path / "back", "huggingface")
    (tmp_path / "megatron" / "huggingface").rename(tmp_path / "elsewhere")

    # The arguments are those of another family, too.
    is_named = name.startswith(("mistral", "glm4_moe_lite", "qwen3_5_moe"))
    source = SourceOptions(model_type=CONFIGS[name]["model_type"] if is_named else None)
    told = _convert(tmp_path / "megatron", tmp_path / "again", "huggingface", given=source)
    assert "there is no tokenizer; copy one beside the model" in told
    assert_same_tensors(tmp_path / "hf", tmp_path / "again")
    assert load_spec(tmp_path / "again", "lm") == load_spec(tmp_path / "hf", "lm")


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "mistral"])
def test_a_critic_is_a_classifier_with_one_label(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "hf", scalar=True)
    save_training(tmp_path / "hf", tmp_path / "ours", role="critic")
    _convert(tmp_path / "ours", tmp_path / "back", "huggingface", max_file_bytes=20_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1

    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1
    wanted = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in model.state_dict().items())

    with pytest.raises(CheckpointError, match="no model with a scalar head"):
        _convert(tmp_path / "hf", tmp_path / "megatron", "megatron")
    assert not (tmp_path / "megatron").exists()


def test_in_another_dtype_a_correction_of_scores_stays_in_float32(tmp_path: Path) -> None:
    """In bfloat16 it would choose other experts."""
    save_model("glm4_moe", tmp_path / "hf")
    save_training(tmp_path / "hf", tmp_path / "ours", dtype=torch.bfloat16)
    wanted = read_tensors(tmp_path / "hf")
    for source in ("hf", "ours"):
        target = tmp_path / f"from {source}"
        _convert(tmp_path / source, target, "huggingface", dtype=torch.bfloat16)
        found = read_tensors(target)
        for name, tensor in wanted.items():
            is_correction = name.endswith("e_score_correction_bias")
            dtype = torch.float32 if is_correction else torch.bfloat16
            assert torch.equal(found[name], tensor.to(dtype)) and found[name].dtype == dtype, name
        assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16


def test_a_draft_model_is_left_out_and_said(tmp_path: Path) -> None:
    """Published GLM models have one; its layers follow those of the model."""
    save_model("glm4_moe", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    draft = {"model.layers.4.eh_proj.weight": torch.zeros(32, 64)}
    save_file({**tensors, **draft}, file)
    told = _convert(tmp_path / "hf", tmp_path / "megatron", "megatron")
    assert "tensors of a draft model or of what reads images: 1" in told
    _convert(tmp_path / "megatron", tmp_path / "back", "huggingface")
    assert read_tensors(tmp_path / "back").keys() == tensors.keys()


def test_a_copy_of_the_embedding_is_left_out_and_said(tmp_path: Path) -> None:
    save_model("qwen2-tied", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    told = _convert(tmp_path / "hf", tmp_path / "back", "huggingface")
    assert any(text.startswith("lm_head.weight: a copy") for text in told)

    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file)
    told = _convert(tmp_path / "hf", tmp_path / "other", "huggingface")
    assert any("lm_head.weight differs from the embedding" in text for text in told)
    for directory in ("hf", "other"):  # transformers keeps them apart too
        model = AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
        assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


def test_every_key_of_a_model_counts(tmp_path: Path) -> None:
    """More refusals, in words that runs share, are in test_hf_weights.py and test_stored.py."""
    save_model("llama", tmp_path / "hf", scalar=True)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    del tensors["score.weight"]  # which a run may draw anew
    save_file(tensors, file)

    with pytest.raises(WeightError, match=r"no tensor score\.weight; "):
        _convert(tmp_path / "hf", tmp_path / "copy", "huggingface")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_model_in_another_form_is_read_as_runs_read_it(tmp_path: Path) -> None:
    """All experts of a layer in one tensor, and names without the prefix of the model."""
    save_model("mixtral", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    file = tmp_path / "fused" / "model.safetensors"
    held = load_file(file)
    assert any(name.endswith("experts.gate_up_proj") for name in held)
    save_file({name.removeprefix("model."): tensor for name, tensor in held.items()}, file)

    _convert(tmp_path / "fused", tmp_path / "back", "huggingface")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_a_runs_tokenizer_comes_as_the_run_exports_it(tmp_path: Path) -> None:
    """With its chat template and, of a scalar model, its padding; `--like` gives another."""
    save_model("llama", tmp_path / "model")
    save_model("llama", tmp_path / "scores", scalar=True)
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.5}')
    texts = [*"0123456789+=", "12+3=15"]
    train_sentencepiece(texts, tmp_path / "tokenizer", vocab_size=32, byte_fallback=False)
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}!")
    for role, model, named in (
        ("actor", "model", "tokenizer"),
        ("model", "model", "tokenizer/tokenizer.model"),
        ("model", "scores", "tokenizer"),
    ):
        data = {"tokenizer": str(tmp_path / named), "chat_template": str(template)}
        config = {"data": data, role: {"path": str(tmp_path / model)}}
        step = tmp_path / f"{role}-{model}" / checkpoint_name(0, unfinished_step=False)
        save_training(tmp_path / model, step, role=role, config=config)
        to_megatron = {"megatron": "huggingface"} if model == "model" else {}
        for to, place in ({"huggingface": ""} | to_megatron).items():
            out = tmp_path / f"{role}-{model}-{to}"
            _convert(step, out, to)
            ours = load_tokenizer(out / place)
            run = load_tokenizer(tmp_path / named, template)
            assert ours.apply_chat_template(TALK) == run.apply_chat_template(TALK) == "hi!"
            assert ours.encode("12+3=") == run.encode("12+3=")
            assert ours.pad_id == (0 if model == "scores" else run.pad_id)
            stated = json.loads((out / place / "tokenizer_config.json").read_text())
            assert stated["tokenizer_class"] == "PreTrainedTokenizerFast"
            assert (out / place / "generation_config.json").exists() == (model == "model")

    template.unlink()
    with pytest.raises(DataError, match=r"data.chat_template, .*own.jinja, is not there; .*--like"):
        _convert(step, tmp_path / "out", "huggingface")
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "scores", dirs_exist_ok=True)
    _convert(step, tmp_path / "out", "huggingface", given=SourceOptions(like=tmp_path / "scores"))
    assert not load_tokenizer(tmp_path / "out").has_chat_template


def test_a_result_is_not_replaced_in_silence(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="is there already; give another one, or --overwrite"):
        _convert(tmp_path / "hf", tmp_path / "out", "megatron")
    _convert(tmp_path / "hf", tmp_path / "out", "megatron", overwrite=True)
    assert not (tmp_path / "out" / "mine").exists()

    for target in (tmp_path / "hf", tmp_path):
        with pytest.raises(CheckpointError, match="holds the source"):
            _convert(tmp_path / "hf", target, "megatron", overwrite=True)


def test_a_rope_that_megatron_cannot_have_is_refused(tmp_path: Path) -> None:
    rope = {**CONFIGS["llama-tied-llama3"]["rope_parameters"], "high_freq_factor": 5.0}
    save_model("llama", tmp_path / "hf", rope_parameters=rope)
    with pytest.raises(CheckpointError, match="Megatron-LM has arguments for Llama 3's"):
        _convert(tmp_path / "hf", tmp_path / "megatron", "megatron")


def test_another_epsilon_of_latents_is_told(tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path / "hf", rms_norm_eps=1e-5)
    told = _convert(tmp_path / "hf", tmp_path / "megatron", "megatron")
    text = "the epsilon 1e-05 of all norms; transformers gives them 1e-06"
    assert [note.endswith(text) for note in told].count(True) == 1
    _convert(tmp_path / "megatron", tmp_path / "back", "huggingface")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("format", ["huggingface", "megatron"])
def test_a_full_disk_is_said_and_leaves_nothing(format: str, tmp_path: Path) -> None:
    """A limit on the size of a file stands for the disk."""
    save_model("llama", tmp_path / "hf")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"File too large"):
            _convert(tmp_path / "hf", tmp_path / "out", format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_option_that_contradicts_the_model_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    _convert(tmp_path / "hf", tmp_path / "megatron", "megatron")
    given = SourceOptions(vocab_size=37, model_type="llama")
    _convert(tmp_path / "megatron", tmp_path / "same", "huggingface", given=given)
    for given in (SourceOptions(vocab_size=36), SourceOptions(model_type="qwen2")):
        with pytest.raises(CheckpointError, match="contradicts the config"):
            _convert(tmp_path / "megatron", tmp_path / "other", "huggingface", given=given)


def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    save_model("llama", tmp_path / "hf", torch.float32)
    capsys.readouterr()  # transformers shows its progress
    save_training(tmp_path / "hf", tmp_path / "ours")
    out = ["--out", str(tmp_path / "out")]
    copied = [str(tmp_path / "hf"), "--to", "huggingface", *out]
    ours = [str(tmp_path / "ours"), "--to", "megatron", *out]

    for arguments, message in (
        (["--inspect", str(tmp_path / "nowhere")], "nowhere is not a directory"),
        ([str(tmp_path / "empty"), "--to", "megatron", "--out", "x"], "is no Hugging Face model"),
        ([str(tmp_path / "empty"), "--to", "megatron"], "--out is missing; see --help"),
        (["--to", "onnx"], "argument --to: invalid choice: 'onnx'"),
        (["x", "--to", "megatron", "--vocab-size", "0"], "--vocab-size: 0 is not positive"),
        (["--inspect", "x", "--step", "3"], "--inspect DIR takes no other argument than --verify"),
        ([*copied, "--vocab-size", "9"], "--vocab-size has no meaning for a Hugging Face model"),
        ([*copied, "--like", "x"], "--like has no meaning for a Hugging Face model"),
        ([*copied, "--norm-names", "own"], "--norm-names goes with --to megatron alone"),
        ([*copied, "--step", "3"], "--step chooses a checkpoint of a run; "),
        ([*ours, "--model-type", "llama"], "--model-type has no meaning for a training checkpoint"),
    ):
        try:
            code: Any = convert_checkpoint.main(arguments)
        except SystemExit as exit:
            code = exit.code

        assert code == 2, arguments
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert said.err.startswith("error: ") and message in said.err

    assert not (tmp_path / "out").exists()


_MEASURE = """
import sys
sys.modules["triton"] = None  # a GPU's compiler, which torch would import, and which takes memory
sys.path.insert(0, {root!r})
from mrlhf.commands import convert_checkpoint
def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0])
for arguments in {commands!r}:
    before = peak()
    assert convert_checkpoint.main(arguments) == 0
    print("GREW", peak() - before)
assert "megatron.core" not in sys.modules
assert not __import__("torch").distributed.is_initialized()
"""


def test_memory_is_bounded_by_a_file_and_not_by_the_model(tmp_path: Path) -> None:
    size = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 50}
    save_model("llama", tmp_path / "hf", **size, vocab_size=512, head_dim=32)
    model = sum(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")) // 1000
    assert model > 350_000, "kB"

    commands = []
    for source, to in (("hf", "megatron"), ("megatron", "huggingface")):
        arguments = [str(tmp_path / source), "--to", to, "--out", str(tmp_path / to)]
        commands.append([*arguments, "--max-shard-mb", "50", "--verify"])
    program = _MEASURE.format(root=str(ROOT), commands=commands)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    grown = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("GREW")]
    assert len(grown) == 2
    assert sum(grown) < 100_000, f"kB for a model of {model} kB: {grown}"
    index = json.loads((tmp_path / "huggingface" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 5
