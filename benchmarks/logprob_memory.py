"""Measures memory and time of log-probabilities with their gradient, in chunks and whole.

The whole form makes the logits of all tokens and keeps them for the backward pass. In chunks, the
loss is one of single tokens; of short sequences, of which a chunk holds several; or of one sequence
that is longer than a chunk, whose logits are computed twice.

For each number of tokens and each vocabulary, each form runs in a process of its own. The peak is
that of resident memory during the runs, less the resident memory before them. The gradient of the
weight, which every form has to make, is a part of it and is said separately. Linux only. Seconds
are of the processor, of one thread.

    python benchmarks/logprob_memory.py --tokens 512 1024 2048 --vocabularies 32768 151936
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mrlhf.parallel.vocab import LossParts, OutputLayer, Tokens
from mrlhf.parallel.vocab_sums import NumbersToCompute

FORMS = ("whole", "chunks", "chunks, short sequences", "chunks, one long sequence")
SHORT = 64  # tokens of a short sequence


class _Measured(NamedTuple):
    """What the runs of a form took."""

    peak: int  # bytes above those before the runs
    gradient: int  # bytes of the weight's gradient, a part of the peak
    seconds: float  # of one run, the median


def _forms(weight: Tensor, tokens: int) -> dict[str, Callable[[], Tensor]]:
    """What gives the loss in each form, for a `weight` of [vocab, hidden]."""
    vocabulary, hidden_size = weight.shape
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    layer = OutputLayer(weight, None, vocabulary, 1.0)
    short = [SHORT] * (tokens // SHORT) + [tokens % SHORT]

    def whole() -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight)
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    def chunks(lengths: list[int], by_token: bool) -> Tensor:
        parts = LossParts(layer, Tokens(hidden, targets, lengths), NumbersToCompute(), by_token)
        for part in parts:
            parts.add(part, part.numbers.logprobs.sum())
        return parts.total()

    functions = (
        whole,
        lambda: chunks([tokens], True),
        lambda: chunks(short, False),
        lambda: chunks([tokens], False),
    )
    return dict(zip(FORMS, functions, strict=True))


def _measure(form: str, tokens: int, hidden_size: int, vocabulary: int, runs: int) -> _Measured:
    """Run a form in this process, which must be new."""
    torch.set_num_threads(1)
    # Scaled in place: the memory of a freed copy would hide as much of the peak.
    weight = torch.randn(vocabulary, hidden_size).mul_(0.05).requires_grad_()
    function = _forms(weight, tokens)[form]

    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak until now
    before = _memory("VmRSS")
    seconds = []
    for _ in range(runs):
        begin = time.process_time()
        function().backward()
        seconds.append(time.process_time() - begin)
    peak = _memory("VmHWM") - before

    assert weight.grad is not None
    return _Measured(peak, weight.grad.nbytes, statistics.median(seconds))


def _memory(name: str) -> int:
    """Bytes of this process; Linux calls the resident memory VmRSS and its peak VmHWM."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


def main() -> None:
    """Print one row of a table for each vocabulary, number of tokens and form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32768, 151936])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()

    heads = "peak, MiB | of it weight.grad, MiB | seconds | against whole"
    print(f"| vocabulary | tokens | form | {heads} |")
    print("|---|---|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for vocabulary in arguments.vocabularies:
        for tokens in arguments.tokens:
            base = None
            for form in FORMS:
                with context.Pool(1) as pool:
                    case = (form, tokens, arguments.hidden_size, vocabulary, arguments.runs)
                    measured = pool.apply(_measure, case)
                base = base or measured.seconds
                print(
                    f"| {vocabulary} | {tokens} | {form} | {measured.peak / 2**20:.0f} | "
                    f"{measured.gradient / 2**20:.0f} | {measured.seconds:.2f} | "
                    f"{measured.seconds / base:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
