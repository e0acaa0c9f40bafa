"""The files of a tokenizer, copied so that transformers 4 reads them as transformers 5 does.

What transformers 5 itself saves has another class than the source, and lacks files and a key that
classes of transformers 4 need. This file does not know what tokens are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from mrlhf.data.hub_files import read_object
from mrlhf.errors import DataError

CONFIG_FILE = "tokenizer_config.json"
FILES = (
    "tokenizer*",
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.tiktoken", "tekken.json", "chat_template*"),
)
"""Files that belong to a tokenizer; code is not among them."""
_NEW_CLASS = "TokenizersBackend"


def copy_files(source: Path, directory: Path, patterns: Sequence[str] = FILES) -> None:
    """Copy the files with such names from `source`."""
    for pattern in patterns:
        for file in source.glob(pattern):
            if file.is_file() and file.suffix != ".py":
                shutil.copyfile(file, directory / file.name)


def adapt_files(
    directory: Path,
    class_name: str | None = None,
    template: str | None = None,
    pad_token: str | None = None,
) -> None:
    """Make a tokenizer's files readable for transformers 4; they get what is given besides.

    `class_name` counts if they name no class.
    """
    files = [directory / CONFIG_FILE, directory / "special_tokens_map.json"]
    config, tokens = (read_object(file, DataError) if file.is_file() else {} for file in files)
    # transformers 5 knows its class without rules of its own under the earlier name too.
    name = config.get("tokenizer_class") or class_name
    if name is not None:
        config["tokenizer_class"] = "PreTrainedTokenizerFast" if name == _NEW_CLASS else name
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")

    if template is not None:
        for file in directory.glob("chat_template*"):
            file.unlink()
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        if "chat_template" in config:
            config["chat_template"] = template
    if pad_token is not None:
        config["pad_token"] = tokens["pad_token"] = pad_token
    for file, content in zip(files, (config, tokens), strict=True):
        if content:
            text = json.dumps(content, indent=2, ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")
