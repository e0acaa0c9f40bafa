"""Writes what is made from the code: docs/configuration.md, docs/metrics.md and configs/schema/.

Usage: python tools/write_configuration_page.py [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.pages.configuration import LAUNCHERS, configuration_page
from tools.pages.json_schema import json_schema
from tools.pages.metrics import metrics_page
from tools.pages.other_systems import others_page, verl_page

ROOT = Path(__file__).resolve().parents[1]


def contents() -> dict[str, str]:
    """The text of each file by its path in the repository."""
    files = {
        "docs/configuration.md": configuration_page(),
        "docs/metrics.md": metrics_page(),
        "docs/coming_from_verl.md": verl_page(),
        "docs/coming_from_trl.md": others_page(),
    }
    for launcher, root_class in LAUNCHERS.items():
        text = json.dumps(json_schema(root_class), indent=1, ensure_ascii=False)
        files[f"configs/schema/{launcher}.json"] = text + "\n"
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, write."""
    parser = argparse.ArgumentParser(
        description="Write the pages of all configuration keys and metrics, and the JSON schemas."
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT, metavar="DIR", help="written here, not in the repository"
    )
    out = parser.parse_args(arguments).out

    for name, text in contents().items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
