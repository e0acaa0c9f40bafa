"""Converts checkpoints to Hugging Face's and Megatron-LM's formats.

Usage: mrlhf-convert-checkpoint SOURCE --to huggingface --out DIR
       mrlhf-convert-checkpoint SOURCE --to megatron --out DIR
       mrlhf-convert-checkpoint ADAPTER --merge --to huggingface --out DIR
       mrlhf-convert-checkpoint --inspect DIR

One process without a GPU; it holds one tensor at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from mrlhf.checkpoint.conversion.convert import SourceOptions, TargetOptions, convert
from mrlhf.checkpoint.conversion.identify import examine
from mrlhf.checkpoint.conversion.megatron_arguments import MEGATRON_FAMILIES
from mrlhf.checkpoint.conversion.megatron_writer import MegatronOptions
from mrlhf.commands.endings import OneLineParser, end_command
from mrlhf.data.hub import local_directory
from mrlhf.printable import show, size_text
from mrlhf.run.terminal import ByteBars
from mrlhf.version import add_version_option

_FILE_MB = 5000
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(
        description="Convert a model's checkpoint, or say what a directory is. The format of the "
        "source is found out. The result appears when it is whole.",
        epilog="Exit code 0: done, 1: --inspect found something wrong, 2: bad input.",
    )
    add_version_option(parser)
    source_help = (
        "Hugging Face model, training checkpoint, output directory of a run (the policy with which "
        "it ended is taken, or else its newest checkpoint), or Megatron-LM checkpoint of the "
        "format torch_dist; with --merge an adapter"
    )
    verify_help = "read the result again and compare every tensor; with --inspect: read every byte"
    add = parser.add_argument
    add("source", type=Path, nargs="?", help=source_help)
    add("--inspect", type=Path, metavar="DIR", help="say what DIR is, and stop")
    add("--to", choices=("huggingface", "megatron"))
    add("--out", type=Path, metavar="DIR", help="where the result goes")
    add("--overwrite", action="store_true", help="replace what is at --out")
    add("--verify", action="store_true", help=verify_help)
    add("--dtype", choices=_DTYPES, help="of the weights; the source's by default")
    add("--max-shard-mb", type=_positive, help=f"size of a file (default: {_FILE_MB})")
    _add_source_options(parser)
    _add_target_options(parser)

    options = parser.parse_args(arguments)
    if options.inspect is None:
        for name in ("source", "to", "out"):
            if getattr(options, name) is None:
                parser.error(f"{'SOURCE' if name == 'source' else '--' + name} is missing")
        for name in ("vocab_divisible_by", "norm_names"):
            if getattr(options, name) is not None and options.to != "megatron":
                parser.error(f"--{name.replace('_', '-')} goes with --to megatron alone")
        return options
    for name, value in vars(options).items():
        if name not in ("inspect", "verify") and value not in (None, False):
            parser.error("--inspect DIR takes no other argument than --verify")
    return options


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    like_help = "a Hugging Face model of the same shape, whose config.json and tokenizer are used"
    merge_help = "merge an adapter (LoRA) into its base, in float32, rounded once"
    vocab_help = "tokens of a Megatron-LM checkpoint without padding"
    add = parser.add_argument_group("what the source does not say").add_argument
    add("--step", type=_not_negative, help="which checkpoint of a run (default: its newest state)")
    add("--role", help="which model of a training checkpoint; the actor, or the only one")
    add("--like", type=Path, metavar="DIR", help=like_help)

    add("--merge", action="store_const", const=True, help=merge_help)
    add("--base", type=Path, metavar="DIR", help="base of the adapter; the one that it names")

    add("--vocab-size", type=_positive, help=vocab_help)
    add("--model-type", choices=MEGATRON_FAMILIES, help="family of a Megatron-LM checkpoint")


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what the result is to be").add_argument
    add(
        "--vocab-divisible-by",
        type=_positive,
        help="megatron: --make-vocab-size-divisible-by times its tensor-parallel size "
        f"(default: {MegatronOptions.vocab_divisible_by})",
    )
    add(
        "--norm-names",
        choices=("fused", "own"),
        help="megatron: names of the layers' norms, as TransformerEngine's layers have them and "
        "recent Megatron-LM writes them (fused, the default), or input_layernorm and "
        "pre_mlp_layernorm",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect or convert; 0 when done, 2 on bad input, 1 if an inspected directory is damaged."""
    options = parse(arguments)
    if options.inspect:
        return end_command(lambda: _inspect(options.inspect, options.verify), options.inspect)
    return end_command(lambda: _convert(options), options.out)


def _inspect(directory: Path, every_byte: bool) -> int:
    finding = examine(directory, every_byte)
    for label, text in finding.facts:
        show(f"{label}: {text}")
    for problem in finding.problems:
        show(f"NOT WHOLE: {problem}")
    if not finding.problems:
        show("whole: yes")
    return 1 if finding.problems else 0


def _here(path: Path | None, weights: bool = True) -> Path | None:
    return None if path is None else Path(local_directory(str(path), weights=weights))


def _convert(options: argparse.Namespace) -> int:
    target = TargetOptions(
        format=options.to,
        dtype=None if options.dtype is None else _DTYPES[options.dtype],
        max_file_bytes=(options.max_shard_mb or _FILE_MB) * 10**6,
        megatron=MegatronOptions(
            vocab_divisible_by=options.vocab_divisible_by or MegatronOptions.vocab_divisible_by,
            fused_norms=options.norm_names != "own",
        ),
        overwrite=options.overwrite,
    )
    source = SourceOptions(
        options.role,
        _here(options.like, weights=False),
        options.vocab_size,
        options.model_type,
        options.step,
        options.merge,
        _here(options.base),
    )
    source_path = Path(local_directory(str(options.source)))

    with ByteBars() as bars:
        report = convert(
            source_path, options.out, source, target, verify=options.verify, start=bars.begin
        )

    of_step = "" if report.step is None else f", of step {report.step}"
    show(f"{report.path}: {report.kind}{of_step}")
    for text in report.left_out:
        show(f"left out: {text}")
    for text in report.notes:
        show(f"note: {text}")
    show(f"{options.out}: {report.tensors} tensors, {size_text(report.nbytes)}")
    return 0


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
