"""Measures memory and time of log-probabilities with their gradient, in chunks and whole.

The whole form makes the logits of all tokens and keeps them for the backward pass. For each number
of tokens and each vocabulary, each form runs in a process of its own, whose peak of resident memory
is compared with that before the run. Seconds are of the processor, of one thread.

    python benchmarks/logprob_memory.py --tokens 512 1024 2048 --vocabularies 32768 151936
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mrlhf.parallel.vocab import OutputLayer, Tokens, token_loss
from mrlhf.parallel.vocab_sums import TokenNumbers, Wanted

FORMS = ("whole", "chunks", "chunks, computed twice")


def _sum_of_logprobs(part: slice, numbers: TokenNumbers) -> Tensor:
    return numbers.logprobs.sum()


def _forms(tokens: int, hidden_size: int, vocabulary: int) -> dict[str, Callable[[], Tensor]]:
    """What gives the loss in each form."""
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = (0.05 * torch.randn(vocabulary, hidden_size)).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    layer = OutputLayer(weight, None, vocabulary, 1.0)
    some = Tokens(hidden, targets)

    def whole() -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight)
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    def chunks(by_token: bool) -> Tensor:
        return token_loss(layer, some, Wanted(), _sum_of_logprobs, by_token)

    return dict(zip(FORMS, (whole, lambda: chunks(True), lambda: chunks(False)), strict=True))


def _measure(form: str, tokens: int, hidden_size: int, vocabulary: int, runs: int) -> list[float]:
    """Bytes above those before the run, and the median of the seconds."""
    torch.set_num_threads(1)
    function = _forms(tokens, hidden_size, vocabulary)[form]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(runs):
        begin = time.process_time()
        function().backward()
        seconds.append(time.process_time() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [1024.0 * (peak - before), statistics.median(seconds)]


def main() -> None:
    """Print one row of a table for each vocabulary, number of tokens and form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32768, 151936])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()

    print("| vocabulary | tokens | form | peak, MiB | seconds | against whole |")
    print("|---|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for vocabulary in arguments.vocabularies:
        for tokens in arguments.tokens:
            base = None
            for form in FORMS:
                with context.Pool(1) as pool:
                    case = (form, tokens, arguments.hidden_size, vocabulary, arguments.runs)
                    peak, seconds = pool.apply(_measure, case)
                base = base or seconds
                print(
                    f"| {vocabulary} | {tokens} | {form} | {peak / 2**20:.0f} | {seconds:.2f} | "
                    f"{seconds / base:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
