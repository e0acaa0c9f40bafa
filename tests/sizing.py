"""The table of docs/memory.md, from the preflight's prediction of a model's bytes.

`python -m tests.sizing` writes it into the page; `tests/unit/test_pages.py` says whether it
is up to date.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from mrlhf.models.families import load_spec
from mrlhf.models.spec import Lora
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.preflight.model_bytes import training_bytes
from tests.models.published import write_published

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
TABLE = re.compile(r"^\| model \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
BFLOAT16 = 2
RANK = 32

# Model, and for each row tp, pp, dp and ep.
LAYOUTS: dict[str, list[tuple[int, int, int, int]]] = {
    "Qwen2.5-1.5B": [(1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 8, 1)],
    "Qwen3-8B": [(1, 1, 1, 1), (1, 1, 8, 1), (2, 1, 4, 1), (4, 1, 2, 1), (2, 1, 8, 1)],
    "Qwen3-32B": [(4, 1, 1, 1), (8, 1, 1, 1), (8, 1, 2, 1), (8, 1, 4, 1), (8, 2, 2, 1)],
    "Qwen3-30B-A3B": [(4, 1, 2, 8), (4, 1, 4, 8), (4, 1, 8, 8)],
    "Llama-3.3-70B-Instruct": [(8, 1, 1, 1), (8, 2, 2, 1), (8, 4, 1, 1), (8, 4, 2, 1)],
}
HEAD = [
    "| model | GPUs | layout | GRPO | GRPO with KL | PPO with KL | GRPO, LoRA |",
    "|---|---|---|---|---|---|---|",
]


def table() -> str:
    """The table in Markdown."""
    lines = list(HEAD)
    with tempfile.TemporaryDirectory() as place:
        write_published(Path(place))
        for model, layouts in LAYOUTS.items():
            lines += [_row(place, model, *sizes) for sizes in layouts]
    return "\n".join(lines)


def _row(place: str, model: str, tp: int, pp: int, dp: int, ep: int) -> str:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep, etp=1 if ep > 1 else tp)
    spec = load_spec(f"{place}/{model}", "lm")
    scalar = load_spec(f"{place}/{model}", "scalar")
    adapted = replace(spec, lora=Lora(rank=RANK, alpha=RANK))

    actor = training_bytes(spec, layout, BFLOAT16, splits_optimizer=True)
    critic = training_bytes(scalar, layout, BFLOAT16, splits_optimizer=True)
    adapters = training_bytes(adapted, layout, BFLOAT16, splits_optimizer=True)
    with_reference = actor.total + actor.weights

    totals = (actor.total, with_reference, with_reference + critic.total, adapters.total)
    cells = [f"{total / 1e9:.0f}" for total in totals]
    sizes = {"tp": tp, "pp": pp, "ep": ep, "dp": dp}
    words = " ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    name = model.removesuffix("-Instruct")
    return f"| {name} | {tp * pp * dp} | {words or '-'} | {' | '.join(cells)} |"


def main() -> None:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(table(), page, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
