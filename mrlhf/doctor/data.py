"""Checks of a run's data: how long its rows are, and whether the reward knows a right answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mrlhf.batch import Prompts
from mrlhf.config.roots import AnyConfig, PPOConfig, PreferenceConfig
from mrlhf.doctor.findings import Finding, broken, judged, ok
from mrlhf.inputs import read_ppo_inputs, read_row_inputs
from mrlhf.inputs.read import PPOInputs
from mrlhf.rewards.interface import RewardInput

_BARS = "▁▂▃▄▅▆▇█"
_BINS = 12
_MOST_SCORED = 200
# The ways in which a right answer is often written; the first is the answer alone.
_FORMS: dict[str, Callable[[str], str]] = {
    "the answer alone": str,
    "#### answer": lambda answer: f"#### {answer}",
    "\\boxed{answer}": lambda answer: f"\\boxed{{{answer}}}",
    "<answer>answer</answer>": lambda answer: f"<answer>{answer}</answer>",
}


def data(config: AnyConfig) -> Iterator[Finding]:
    """Read a run's data as the run would, which raises as the run would, and look at it."""
    if isinstance(config, PPOConfig):
        inputs = read_ppo_inputs(config)
        try:
            yield from _prompts(config, inputs)
        finally:
            inputs.reward.close()
        return

    examples = read_row_inputs(config).examples
    if isinstance(config, PreferenceConfig):
        noun: str = config.rows
        lengths = [max(map(len, responses)) for responses in examples.responses]
    else:
        noun = "rows"
        lengths = [len(example.token_ids) for example in examples]
    yield _lengths(noun, lengths, "data.max_length", config.data.max_length)


def _prompts(config: PPOConfig, inputs: PPOInputs) -> Iterator[Finding]:
    dataset = inputs.prompts
    lengths = [len(ids) for ids in dataset.batch(range(len(dataset))).token_ids]
    limit = config.data.max_prompt_length
    yield _lengths("prompts", lengths, "data.max_prompt_length", limit)
    if dataset.dropped:
        share = dataset.dropped / (dataset.dropped + len(dataset))
        yield judged(
            share < 0.05,
            "prompts",
            f"{dataset.dropped} ({share:.0%}) are longer than {limit} tokens and are dropped",
            "raise data.max_prompt_length",
        )
    yield from _right_answers(inputs)


def _lengths(noun: str, lengths: Sequence[int], key: str, limit: int) -> Finding:
    """The lengths with a histogram from 0 to the longest."""
    top = max(lengths)
    counts = [0] * _BINS
    for length in lengths:
        counts[min(_BINS - 1, length * _BINS // (top + 1))] += 1
    most = max(counts)
    heights = [-(-count * len(_BARS) // most) for count in counts]
    bars = "".join(f" {_BARS}"[height] for height in heights)
    middle = sorted(lengths)[len(lengths) // 2]
    seen = f"{len(lengths)}, median {middle} tokens, longest {top} of {key} {limit} |{bars}|"
    return judged(
        10 * top > limit, noun, seen, f"{key} may be lower: room is kept for rows of that length"
    )


def _right_answers(inputs: PPOInputs) -> Iterator[Finding]:
    """Score the reference answers, as if a policy had written them in one of the usual ways."""
    reward = inputs.reward
    if reward.external or reward.judge is not None or not reward.reads_text:
        yield ok("reward", "it reads a model, so reference answers are not scored")
        return
    dataset = inputs.prompts
    prompts = dataset.batch(range(min(len(dataset), _MOST_SCORED)))
    rows = [index for index, answer in enumerate(prompts.ground_truth) if answer is not None]
    if not rows:
        yield ok("reward", "no row has a reference answer")
        return

    by_form = {name: _scores(inputs, prompts, rows, write) for name, write in _FORMS.items()}
    best = max(by_form, key=lambda name: sum(score > 0 for score in by_form[name]))
    right = sum(score > 0 for score in by_form[best])
    seen = f"{right} of {len(rows)} reference answers score above 0, written as {best}"
    if right:
        yield judged(
            right == len(rows),
            "reward",
            seen,
            "the others would score 0 however a policy answers; look at their rows",
        )
        return
    yield broken(
        "reward",
        f"no reference answer scores above 0, in any of the forms {', '.join(_FORMS)}",
        "the reward may look for another form, or the answers stand in another column; try it on a "
        "response that you know is right",
    )


def _scores(
    inputs: PPOInputs, prompts: Prompts, rows: Sequence[int], write: Callable[[str], str]
) -> list[float]:
    responses = [
        RewardInput(
            data_source=prompts.data_source[row],
            prompt_text=prompts.text[row],
            solution_str=write(str(prompts.ground_truth[row])),
            ground_truth=prompts.ground_truth[row],
            extra_info=prompts.extra_info[row],
            response_tokens=1,
        )
        for row in rows
    ]
    return inputs.reward.score(responses).scores
