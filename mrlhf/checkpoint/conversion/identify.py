"""Identifies a directory: its format, its model and step, and whether it is whole.

It reads names, headers, indices and manifests, and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mrlhf.checkpoint.conversion.adapter_source import AdapterSource, MergedSource
from mrlhf.checkpoint.conversion.megatron_arguments import SHAPE_ARGUMENTS
from mrlhf.checkpoint.conversion.megatron_names import split_names
from mrlhf.checkpoint.conversion.megatron_reader import ASSETS, find_folder, read_common
from mrlhf.checkpoint.conversion.model_files import CONFIG_FILE, HuggingFaceSource
from mrlhf.checkpoint.conversion.model_source import ModelSource
from mrlhf.checkpoint.conversion.run_output import ADAPTER, choose, models_in
from mrlhf.checkpoint.conversion.torch_dist import TorchDistReader
from mrlhf.checkpoint.conversion.training_checkpoints import model_spec
from mrlhf.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    check_sizes,
    checkpoints_in,
    read_manifest,
)
from mrlhf.checkpoint.tensor_file import describe_file
from mrlhf.errors import CheckpointError, MrlhfError
from mrlhf.models.spec import ModelSpec
from mrlhf.printable import size_text
from mrlhf.weights.boxes import whole

Facts = Iterator[tuple[str, str]]
# The folder of a checkpoint that holds its policy as a Hugging Face model, if it has one.
EXPORT = "hf"

_WITHOUT_HASHES = {
    False: "tensors; --verify reads every one of them",
    True: "values of tensors, since the format has no hashes",
}
_LEGACY = ("mp_rank_00", "mp_rank_00_000")
_LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "data_parallel_size": "dp",
}


@dataclass(frozen=True)
class Identified:
    """The format of a directory, and the checkpoint in it."""

    format: Literal["huggingface", "adapter", "megatron", "training"]
    kind: str  # the format in words
    path: Path  # the checkpoint itself; a run's output directory holds several
    assets: Path | None  # a directory with the tokenizer, if there is one beside the weights
    step: int | None = None  # last step of the run, if this is its final policy
    passed_over: list[str] = field(default_factory=list)  # why newer checkpoints are not taken


@dataclass(frozen=True)
class Examination:
    """The result of an examination."""

    facts: list[tuple[str, str]]  # labels and texts, in order
    problems: list[str]


def identify(path: Path, step: int | None = None, role: str | None = None) -> Identified:
    """Identify the directory by the files in it; CheckpointError if it is of no known format.

    `step` and `role` choose in the output directory of a run, as in `choose`.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")

    if (path / MANIFEST).is_file():
        return Identified("training", "training checkpoint", path, _export_in(path))
    choice = choose(path, step, role)
    if choice is not None and choice.step is not None:
        kind = "output directory of a finished run"
        is_adapter = (choice.path / ADAPTER).is_file()
        form: Literal["adapter", "huggingface"] = "adapter" if is_adapter else "huggingface"
        return Identified(form, kind, choice.path, choice.path, choice.step)
    if choice is not None:
        assets = _export_in(choice.path)
        kind = "output directory of a run"
        return Identified("training", kind, choice.path, assets, passed_over=choice.passed_over)

    if path.name.lstrip(".").startswith("step_"):
        raise CheckpointError(f"{path} is no whole checkpoint: it has no {MANIFEST}")

    folder = find_folder(path)
    if folder is not None:
        beside = folder.parent / ASSETS
        kind = "Megatron-LM checkpoint"
        return Identified("megatron", kind, path, beside if beside.is_dir() else None)
    if any((path / name).is_dir() for name in _LEGACY):
        raise CheckpointError(
            f"{path} is a Megatron-LM checkpoint of the old format torch; save it anew with "
            f"--ckpt-convert-format torch_dist"
        )
    if (path / ADAPTER).is_file():
        return Identified("adapter", "LoRA adapter", path, path)
    if (path / CONFIG_FILE).is_file() or any(path.glob("model*.safetensors")):
        return Identified("huggingface", "Hugging Face model", path, path)
    models = models_in(path)
    hint = f"; the models in it are {', '.join(models)}: give one of these" if models else ""
    raise CheckpointError(
        f"{path} is no Hugging Face model, training checkpoint, output directory of a run with a "
        f"checkpoint or an end, or Megatron-LM checkpoint{hint}"
    )


def examine(path: Path, every_byte: bool = False) -> Examination:
    """Find the directory's format, model, layout and step, and whether it is whole.

    With `every_byte`, read every tensor, or compare every file with its hash, and not sizes alone.
    A CheckpointError says that it is of no known format.
    """
    found = identify(path)
    facts = [("what", found.kind)]
    problems = list(found.passed_over)
    if found.step is not None:
        facts.append(("policy", f"{found.path}, of its last step {found.step}"))
        names = [checkpoint.name for checkpoint in checkpoints_in(path / CHECKPOINTS)]
        if names:
            facts.append(("not examined", f"its checkpoints: {', '.join(names)}"))

    facts_of = {"training": _facts_of_training, "megatron": _facts_of_megatron}
    try:
        for label, text in facts_of.get(found.format, _facts_of_model)(found, every_byte, problems):
            if label == "what":  # a text that says more
                facts.pop()
            facts.append((label, text))
    except MrlhfError as error:
        problems.append(str(error))
    return Examination(facts, problems)


def _facts_of_model(found: Identified, every_byte: bool, problems: list[str]) -> Facts:
    """Facts about a Hugging Face model, or an adapter and its base."""
    source: ModelSource
    if found.format == "adapter":
        source = MergedSource(AdapterSource(found.path, None, found.step))
        yield "adapter", source.description.kind
    else:
        source = HuggingFaceSource(found.path)
        if found.step is None:
            yield "what", source.description.kind
    yield "model", _model(source.spec)

    if found.format == "huggingface":
        forms = source.tensors.values()
        dtypes = sorted({str(form.dtype).removeprefix("torch.") for form in forms})
        size = size_text(sum(form.nbytes for form in forms))
        yield "tensors", f"{len(forms)}, {size}, {', '.join(dtypes)}"
        for text in source.description.left_out:
            yield "not a weight", text
        has_tokenizer = any(found.path.glob("tokenizer*"))
        yield "tokenizer", "beside it" if has_tokenizer else "none"

    yield "not verified", _WITHOUT_HASHES[every_byte]
    for name in source.tensors if every_byte else ():
        source.read(name)


def _facts_of_training(found: Identified, every_byte: bool, problems: list[str]) -> Facts:
    manifest = read_manifest(found.path)
    yield "checkpoint", str(found.path)
    others = len(checkpoints_in(found.path.parent)) - 1
    if others > 0:
        yield "beside it", f"{others} older or newer checkpoints"
    part = ", and a part of the next one" if manifest.unfinished_step else ""
    yield "step", f"{manifest.step}{part}"
    yield "saved by", f"{manifest.program} on {manifest.world_size} ranks"

    for role, model in manifest.models.items():
        layout = ", ".join(f"{axis} {size}" for axis, size in model.layout.items())
        kinds = ", ".join(model.kinds)
        yield role, f"{_model(model_spec(model))}; {model.dtype}; {layout}; stored: {kinds}"
    for role in manifest.frozen:
        name = f"base of {role}" if role in manifest.models else role
        what = "the rows that it trains on" if role.startswith("data.") else "frozen"
        yield name, f"{what}; its files are elsewhere"

    nbytes = sum(file.nbytes for file in manifest.files)
    yield "files", f"{len(manifest.files)}, {size_text(nbytes)}"
    if not every_byte:
        yield "not verified", "hashes; --verify compares those of all files"
    check_sizes(found.path, manifest.files)
    for listed in manifest.files if every_byte else ():
        if describe_file(found.path, listed.path) != listed:
            problems.append(f"{listed.path} is not what was written")


def _facts_of_megatron(found: Identified, every_byte: bool, problems: list[str]) -> Facts:
    folder = find_folder(found.path)
    assert folder is not None, found
    yield "checkpoint", str(folder)
    reader = TorchDistReader(folder)
    common = read_common(folder)
    if common.iteration is not None:
        yield "step", str(common.iteration)
    arguments = common.arguments or {}
    stated = _stated(arguments, {name: name for name in SHAPE_ARGUMENTS})
    yield "model", stated or "not stated in common.pt"
    yield "saved by", _stated(arguments, _LAYOUT) or "unknown layout"

    weights, others = split_names([*reader.tensors, *reader.objects])
    nbytes = sum(reader.tensors[name].nbytes for name in weights if name in reader.tensors)
    yield "weights", f"{len(weights)} tensors, {size_text(nbytes)}"
    for kind, count in sorted(others.items()):
        yield "not a weight", f"{count} {kind}"

    problems += reader.problems()
    yield "not verified", _WITHOUT_HASHES[every_byte]
    for name in reader.tensors if every_byte and not problems else ():
        reader.read(whole(name, reader.tensors[name].shape))


def _stated(arguments: Mapping[str, Any], words: Mapping[str, str]) -> str:
    """The arguments with these names that are there, each with its word before it."""
    there = {word: arguments.get(name) for name, word in words.items()}
    return ", ".join(f"{word} {value}" for word, value in there.items() if value is not None)


def _export_in(checkpoint: Path) -> Path | None:
    """The policy as a Hugging Face model, whose tokenizer has the run's chat template."""
    return checkpoint / EXPORT if (checkpoint / EXPORT).is_dir() else None


def _model(spec: ModelSpec) -> str:
    head = "language model" if spec.head == "lm" else "scalar head"
    embeddings = ", tied embeddings" if spec.output_is_embedding else ""
    return (
        f"{spec.family}, {spec.num_layers} layers, hidden {spec.hidden_size}, "
        f"{spec.num_heads} heads, {spec.num_kv_heads} KV heads, vocabulary {spec.vocab_size}, "
        f"{head}{embeddings}"
    )
