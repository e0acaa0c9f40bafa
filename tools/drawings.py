"""Draws the pictures of a step, a layout and a hand-over from what the code itself says of them.

Usage: python tools/drawings.py [--out DIR]

The phases of the step are those that the trainer enters, in its order; the ranks of the layout are
where `ParallelLayout` puts them; the bytes of the hand-over are those of the plans of all ranks.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

from mrlhf.models.families import load_spec
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.reshard.plan import Planner, ReshardPlan
from mrlhf.reshard.sides import sides_around

ROOT = Path(__file__).resolve().parents[1]
_FILES = ("rollout/collector.py", "trainers/ppo/work.py")
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.small { font-size: 11px; fill: #57606a; }
rect { stroke: #8c959f; rx: 5px; }
line, path { stroke: #57606a; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #a5b0bc; }
  line, path { stroke: #a5b0bc; }
}"""
# The model that computes in each phase, and its colour.
_COLOURS = {"engine": "#2f7ed855", "actor": "#2a9d5b55", "critic": "#c78c0655", "none": "#8c959f33"}
_WHO = {
    "reshard": ("none", "weights move"),
    "gen": ("engine", "responses"),
    "reward": ("none", "scores"),
    "ref": ("actor", "reference"),
    "old_log_prob": ("actor", "old log-probs"),
    "values": ("critic", "values"),
    "adv": ("none", "advantages"),
    "update_critic": ("critic", "mini-batches"),
    "update_actor": ("actor", "mini-batches"),
}


def main() -> int:
    """Write the pictures; 0 when done."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/images.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)
    return 0


def pictures() -> dict[str, str]:
    """The text of each picture by its file."""
    return {"step.svg": step(), "layout.svg": layout(), "hand_over.svg": hand_over()}


def step() -> str:
    """The phases of one step of PPO, one after the other."""
    parts = [
        _text(0, 14, "One step of PPO: every rank goes through these phases, from left to right")
    ]
    for number, phase in enumerate(phases()):
        who, what = _WHO[phase]
        x = 108 * number
        parts.append(_box(x, 28, 98, 52, _COLOURS[who]))
        parts += [_text(x + 8, 50, phase), _text(x + 8, 68, what, "small")]
    for number, who in enumerate(_COLOURS):
        parts.append(_box(165 * number, 96, 14, 14, _COLOURS[who]))
        words = "no model" if who == "none" else f"the {who} computes"
        parts.append(_text(165 * number + 20, 108, words, "small"))
    return _picture(108 * len(phases()), 118, parts)


def phases() -> list[str]:
    """The phases that the trainer enters, in the order of the step."""
    found = []
    for file in _FILES:
        tree = ast.parse((ROOT / "mrlhf" / file).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith("enter") and isinstance(node.args[0], ast.Constant):
                found.append(str(node.args[0].value))
    return [phase for phase in _WHO if phase in found]


def layout() -> str:
    """The ranks of tp 2, pp 2 and dp 2."""
    placed = ParallelLayout(tp=2, pp=2, dp=2)
    parts = [_text(0, 14, "tp 2, pp 2, dp 2 on 8 ranks: neighbouring ranks share a layer")]
    for rank in range(placed.world_size):
        place = placed.coordinates(rank)
        x = 230 * place.dp + 105 * place.tp
        y = 44 + 78 * place.pp
        parts.append(_box(x, y, 96, 46, _COLOURS["actor"]))
        half = ("left", "right")[place.tp]
        parts += [
            _text(x + 8, y + 19, f"rank {rank}"),
            _text(x + 8, y + 36, f"{half} half", "small"),
        ]
    for dp in range(placed.dp):
        parts.append(_text(230 * dp, 36, f"replica {dp}: its share of the batch", "small"))
        parts.append(f'<path d="M {230 * dp + 100} 92 v 26" marker-end="url(#arrow)"/>')
        parts.append(_text(230 * dp + 108, 110, "activations", "small"))
    parts += [
        _text(470, 70, "the first layers", "small"),
        _text(470, 148, "the last layers", "small"),
    ]
    return _picture(560, 176, parts)


def hand_over() -> str:
    """What each rank receives when weights of tp 2 and pp 2 go into engines of tp 1."""
    source = ParallelLayout(tp=2, pp=2, dp=1)
    engines = EngineLayout.inside(source, 1)
    spec = load_spec(ROOT / "configs" / "models" / "demo_llama", "lm")
    pieces = partial(engine_pieces, spec, engines)
    plans = []
    for rank in range(source.world_size):
        sides = sides_around(rank, engines, partial(role_pieces, spec, source), pieces, pieces)
        plans.append(Planner(sides, 4, lambda rank: range(4)).plan(rank))

    title = "Hand-over from tp 2 x pp 2 to four engines of tp 1: each byte that a rank lacks, once"
    parts = [_text(0, 14, title)]
    for rank, plan in enumerate(plans):
        place = source.coordinates(rank)
        y = 30 + 62 * rank
        parts.append(_box(0, y, 150, 50, _COLOURS["actor"]))
        held = f"stage {place.pp}, {('left', 'right')[place.tp]} half"
        parts += [_text(8, y + 20, f"rank {rank} trains"), _text(8, y + 38, held, "small")]
        parts.append(_box(420, y, 190, 50, _COLOURS["engine"]))
        words = (
            f"{plan.bytes_copied / 1e3:.0f} kB held, {plan.bytes_received / 1e3:.0f} kB received"
        )
        parts += [_text(428, y + 20, f"rank {rank} generates"), _text(428, y + 38, words, "small")]
        parts += _arrows(rank, plan)
    return _picture(620, 30 + 62 * len(plans), parts)


def _arrows(rank: int, plan: ReshardPlan) -> Iterator[str]:
    y = 55 + 62 * rank
    for sender in sorted(plan.receives_by_peer):
        start = 55 + 62 * sender
        yield f'<path d="M 152 {start} C 260 {start}, 300 {y}, 414 {y}" marker-end="url(#arrow)"/>'


def _box(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f'<rect x="{x + 1}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x + 1}" y="{y}"{attribute}>{escape(words)}</text>'


def _picture(width: int, height: int, parts: Sequence[str]) -> str:
    marker = (
        '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M 0 1 L 7 4 L 0 7"/></marker>'
    )
    title = re.sub(r"<[^>]+>", "", parts[0])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2} {height}" '
        f'width="{width + 2}" height="{height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        f"<defs>{marker}</defs>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
