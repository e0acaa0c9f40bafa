"""Identifies a directory: its format, its model and step, and whether it is whole.

It reads names, headers, indices and manifests, and no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mrlhf.checkpoint.conversion.megatron_arguments import SHAPE_ARGUMENTS
from mrlhf.checkpoint.conversion.megatron_names import split_names
from mrlhf.checkpoint.conversion.megatron_reader import ASSETS, Place, find_place, read_common
from mrlhf.checkpoint.conversion.model_files import CONFIG_FILE, HuggingFaceSource
from mrlhf.checkpoint.conversion.run_output import Selection, choose, models_in
from mrlhf.checkpoint.conversion.torch_dist import TorchDistReader
from mrlhf.checkpoint.conversion.training_checkpoints import model_spec
from mrlhf.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    check_sizes,
    checkpoints_in,
    read_manifest,
    size_text,
)
from mrlhf.checkpoint.tensor_file import describe_file
from mrlhf.errors import CheckpointError, MrlhfError
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.boxes import whole

EXPORT = "hf"
"""The folder of a checkpoint that holds its policy as a Hugging Face model, if it has one."""

_WITHOUT_HASHES = {
    False: "tensors; --verify reads every one of them",
    True: "values of tensors, since the format has no hashes",
}
_LEGACY = ("mp_rank_00", "mp_rank_00_000")


@dataclass(frozen=True)
class Found:
    """The format of a directory, and the checkpoint in it.

    Attributes:
        kind: the format in words.
        path: the checkpoint itself; a run's output directory holds several.
        assets: a directory with the tokenizer, if it is known.
        step: last step of the run, if this is its final policy.
        passed_over: why newer checkpoints of the run are not taken.
    """

    format: Literal["huggingface", "megatron", "training"]
    kind: str
    path: Path
    assets: Path | None
    step: int | None = None
    passed_over: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """The result of an examination: (label, text) to print in order, and problems, if any."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def identify(path: Path, wanted: Selection | None = None) -> Found:
    """Identify the directory by the files in it.

    Args:
        wanted: the choice in the output directory of a run; None for its policy.

    Raises:
        CheckpointError: it is no known format, or does not hold what is wanted.
    """
    wanted = wanted or Selection()
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")

    if (path / MANIFEST).is_file():
        return Found("training", "training checkpoint", path, _run_assets(path))
    choice = choose(path, wanted)
    if choice is not None and choice.step is not None:
        kind = "output directory of a finished run"
        return Found("huggingface", kind, choice.path, choice.path, choice.step)
    if choice is not None:
        assets = _run_assets(choice.path)
        kind = "output directory of a run"
        return Found("training", kind, choice.path, assets, passed_over=choice.passed_over)

    if path.name.lstrip(".").startswith("step_"):
        raise CheckpointError(f"{path} is no whole checkpoint: it has no {MANIFEST}")

    place = find_place(path)
    if place is not None:
        assets = place.root / ASSETS
        return Found(
            "megatron", "Megatron-LM checkpoint", path, assets if assets.is_dir() else None
        )
    if any((path / name).is_dir() for name in _LEGACY):
        raise CheckpointError(
            f"{path} is a Megatron-LM checkpoint of the old format torch; save it anew with "
            f"--ckpt-convert-format torch_dist"
        )
    if (path / CONFIG_FILE).is_file() or any(path.glob("model*.safetensors")):
        return Found("huggingface", "Hugging Face model", path, path)
    models = models_in(path)
    hint = f"; the models in it are {', '.join(models)}: give one of these" if models else ""
    raise CheckpointError(
        f"{path} is no Hugging Face model, training checkpoint, output directory of a run with a "
        f"checkpoint or an end, or Megatron-LM checkpoint{hint}"
    )


def examine(path: Path, every_byte: bool = False) -> Finding:
    """Find the directory's format, model, layout and step, and whether it is whole.

    Args:
        every_byte: read every tensor, or compare every file with its hash, and not sizes alone.

    Raises:
        CheckpointError: it is no known format.
    """
    found = identify(path)
    finding = Finding()
    finding.facts.append(("what", found.kind))
    finding.problems.extend(found.passed_over)
    if found.step is not None:
        finding.facts.append(("policy", f"{found.path}, of its last step {found.step}"))
        names = [checkpoint.name for checkpoint in checkpoints_in(path / CHECKPOINTS)]
        if names:
            finding.facts.append(("not examined", f"its checkpoints: {', '.join(names)}"))
    describe: dict[str, Callable[[Found, Finding, bool], None]] = {
        "huggingface": _examine_hugging_face,
        "megatron": _examine_megatron,
        "training": _examine_training,
    }
    try:
        describe[found.format](found, finding, every_byte)
    except MrlhfError as error:
        finding.problems.append(str(error))
    return finding


def _examine_hugging_face(found: Found, finding: Finding, every_byte: bool) -> None:
    source = HuggingFaceSource(found.path)
    try:
        description = source.describe()
        if found.step is None:
            finding.facts[0] = ("what", description.kind)
        finding.facts.append(("model", _model(source.spec)))

        dtypes = sorted(
            {str(form.dtype).removeprefix("torch.") for form in source.tensors.values()}
        )
        nbytes = sum(form.nbytes for form in source.tensors.values())
        finding.facts.append(
            ("tensors", f"{len(source.tensors)}, {size_text(nbytes)}, {', '.join(dtypes)}")
        )
        finding.facts.extend([("not a weight", text) for text in description.left_out])

        has_tokenizer = any(found.path.glob("tokenizer*"))
        finding.facts.append(("tokenizer", "beside it" if has_tokenizer else "none"))
        finding.facts.append(("not verified", _WITHOUT_HASHES[every_byte]))
        for name in source.tensors if every_byte else ():
            source.read(name)
    finally:
        source.close()


def _examine_training(found: Found, finding: Finding, every_byte: bool) -> None:
    manifest = read_manifest(found.path)
    finding.facts.append(("checkpoint", str(found.path)))
    others = len(checkpoints_in(found.path.parent)) - 1
    if others > 0:
        finding.facts.append(("beside it", f"{others} older or newer checkpoints"))
    part = ", and a part of the next one" if manifest.unfinished_step else ""
    finding.facts.append(("step", f"{manifest.step}{part}"))
    finding.facts.append(("saved by", f"{manifest.program} on {manifest.world_size} ranks"))

    for role, model in manifest.models.items():
        layout = ", ".join(f"{axis} {size}" for axis, size in model.layout.items())
        kinds = ", ".join(model.kinds)
        text = f"{_model(model_spec(model))}; {model.dtype}; {layout}; stored: {kinds}"
        finding.facts.append((role, text))
    for role in manifest.frozen:
        finding.facts.append((role, "frozen; its files are elsewhere"))
    nbytes = sum(file.nbytes for file in manifest.files)
    finding.facts.append(("files", f"{len(manifest.files)}, {size_text(nbytes)}"))
    if not manifest.has_hash:
        text = f"{MANIFEST}: an earlier version saved it without a hash"
        finding.facts.append(("not verified", text))
    if not every_byte:
        finding.facts.append(("not verified", "hashes; --verify compares those of all files"))
    check_sizes(found.path, manifest)
    for listed in manifest.files if every_byte else ():
        if describe_file(found.path, listed.path) != listed:
            finding.problems.append(f"{listed.path} is not what was written")


def _examine_megatron(found: Found, finding: Finding, every_byte: bool) -> None:
    place = find_place(found.path)
    assert isinstance(place, Place)
    finding.facts.append(("checkpoint", str(place.folder)))
    reader = TorchDistReader(place.folder)
    common = read_common(place.folder)
    if common.iteration is not None:
        finding.facts.append(("step", str(common.iteration)))
    arguments = common.arguments or {}
    stated = [
        f"{name} {arguments[name]}" for name in SHAPE_ARGUMENTS if arguments.get(name) is not None
    ]
    finding.facts.append(("model", ", ".join(stated) or "not stated in common.pt"))
    layout = [
        f"{short} {arguments[name]}"
        for short, name in (
            ("tp", "tensor_model_parallel_size"),
            ("pp", "pipeline_model_parallel_size"),
            ("vpp", "virtual_pipeline_model_parallel_size"),
            ("dp", "data_parallel_size"),
        )
        if arguments.get(name) is not None
    ]
    finding.facts.append(("saved by", ", ".join(layout) or "unknown layout"))

    weights, others = split_names([*reader.tensors, *reader.objects])
    nbytes = sum(reader.tensors[name].nbytes for name in weights if name in reader.tensors)
    finding.facts.append(("weights", f"{len(weights)} tensors, {size_text(nbytes)}"))
    finding.facts.extend(
        [("not a weight", f"{count} {kind}") for kind, count in sorted(others.items())]
    )
    finding.problems.extend(reader.problems())
    finding.facts.append(("not verified", _WITHOUT_HASHES[every_byte]))
    for name in reader.tensors if every_byte and not finding.problems else ():
        reader.read(whole(name, reader.tensors[name].shape))
    reader.close()


def _run_assets(checkpoint: Path) -> Path | None:
    """The directory with the tokenizer of a run's models: its export, or the source of the run."""
    if (checkpoint / EXPORT).is_dir():
        return checkpoint / EXPORT
    try:
        config = read_manifest(checkpoint).config
    except CheckpointError:
        return None
    for section, key in (("data", "tokenizer"), ("actor", "path"), ("model", "path")):
        stated = config.get(section, {}).get(key) if isinstance(config, dict) else None
        if isinstance(stated, str) and Path(stated).is_dir():
            return Path(stated)
    return None


def _model(spec: ModelSpec) -> str:
    head = "language model" if spec.head == "lm" else "scalar head"
    embeddings = ", tied embeddings" if spec.output_is_embedding else ""
    return (
        f"{spec.family}, {spec.num_layers} layers, hidden {spec.hidden_size}, "
        f"{spec.num_heads} heads, {spec.num_kv_heads} KV heads, vocabulary {spec.vocab_size}, "
        f"{head}{embeddings}"
    )
