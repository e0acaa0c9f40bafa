"""Fine-tuning, reward models and critics trained as slow loops in one process, which ours equal.

They use transformers, compute one sequence at a time, and pack nothing. They
share no code with mrlhf but the types of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.data.preferences import PreferenceRows
from mrlhf.data.rollouts import ScoredResponse
from mrlhf.data.sft import SftExample
from tests.oracle.plain_models import load, weights_of
from tests.oracle.plain_optimizer import LR, Outcome, differentiate, make_optimizer
from tests.oracle.plain_ppo import Case
from tests.oracle.plain_routers import Routers

# The rows of each optimizer step; the rows of the last step's metrics are those of the last list.
SFT_STEPS = ((0, 3, 5, 6, 7), (7, 1, 2, 4, 0, 3))
PAIR_STEPS = ((0, 1, 2, 3), (3, 1, 2, 0))
# The loss on the last of these steps has margins, ties, centring and smoothing; the other has none.
MARGINS = (0.25, 1.5, -0.5, 0.75)
TIES = (False, False, True, False)
TIE_THRESHOLD = 0.4
CENTRING = 0.3
SMOOTHING = 0.2
VALUE_STEPS = ((0, 3, 5, 6, 7), (7, 1, 2, 4, 0, 3))
# The targets of the last of these steps are lambda-returns, those of the first Monte-Carlo returns.
GAMMA = 0.9
LAM = 0.7
# Rows of the rollout, the best first; and the numbers of its rows. Each is learned in a step.
RANKINGS = ((0, 1, 2), (3, 4), (5, 6, 7, 0), (2, 5))
TARGETS = (0.5, -1.0, 2.0, 0.0, 1.5, -0.25, 1.0, 0.75)
# Fewer than some layouts have data-parallel ranks.
HELD_OUT = 2


def sft_examples(rollout: Rollout) -> list[SftExample]:
    """A prompt and a response to be learned from each row of the rollout."""
    sequences = rollout.sequences()
    examples = []
    for row in range(len(sequences)):
        token_ids = sequences[row].tolist()
        prompt = rollout.prompt_lengths[row]
        examples.append(SftExample(token_ids, [int(i >= prompt) for i in range(len(token_ids))]))
    return examples


def preference_pairs(rollout: Rollout) -> PreferenceRows:
    """Every two rows of the rollout, the first of which is the better one."""
    sequences = rollout.sequences()
    ids = [sequences[row].tolist() for row in range(len(sequences))]
    pairs = [[*pair] for pair in zip(ids[0::2], ids[1::2], strict=True)]
    lengths = [max(1, _shared_tokens(*pair)) for pair in pairs]
    return PreferenceRows(pairs, lengths, margins=[*MARGINS], ties=[*TIES])


def rankings(pairs: PreferenceRows) -> PreferenceRows:
    """`RANKINGS` of the responses of the pairs."""
    ids = [ids for pair in pairs.responses for ids in pair]
    return PreferenceRows([[ids[row] for row in rows] for rows in RANKINGS], [1] * 4)


def numbered(pairs: PreferenceRows) -> PreferenceRows:
    """The responses of the pairs, with `TARGETS`."""
    ids = [[ids] for pair in pairs.responses for ids in pair]
    return PreferenceRows(ids, [1] * len(ids), targets=torch.tensor(TARGETS)[:, None])


def scored_responses(rollout: Rollout) -> list[ScoredResponse]:
    """The rows with made-up rewards; in some the policy did not draw every third token."""
    sequences = rollout.sequences()
    responses = []
    for row, length in enumerate(rollout.response_lengths):
        drew = [row % 2 == 0 or i % 3 != 1 for i in range(length)]
        rewards = [float((row + i) % 4 - 1) for i in range(length)]
        responses.append(ScoredResponse(sequences[row].tolist(), drew, rewards))
    return responses


def _shared_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def train_sft(model: Path, examples: Sequence[SftExample], case: Case) -> Outcome:
    """One optimizer step for each of `SFT_STEPS`, and a validation on the first rows."""
    policy = load(model, case.lora, case.freeze)

    def losses(example: SftExample) -> Tensor:
        """Of each token of the response."""
        tokens = torch.tensor(example.token_ids)
        log_p = policy(tokens[None]).logits[0, :-1].log_softmax(dim=-1)
        of_tokens = -log_p.gather(1, tokens[1:, None])[:, 0]
        return of_tokens[torch.tensor(example.loss_mask[1:], dtype=torch.bool)]

    def step(rows: Sequence[int]) -> tuple[Tensor, dict[str, float]]:
        loss = torch.cat([losses(examples[row]) for row in rows]).mean()
        return loss, {"sft/loss": loss.item()}

    metrics = _train("sft", policy, SFT_STEPS, step, case)
    with torch.no_grad():
        every = [losses(example) for example in examples]
    metrics["val/loss"] = torch.cat(every[:HELD_OUT]).mean().item()
    mean = torch.cat(every).mean().item()
    # Of a ratio of two sums: https://en.wikipedia.org/wiki/Ratio_estimator
    count = len(every)
    above = sum((row.sum().item() - mean * len(row)) ** 2 for row in every)
    metrics["se/val/loss"] = math.sqrt(count / (count - 1) * above) / sum(map(len, every))
    return Outcome(metrics, weights_of(policy))


def train_reward_model(model: Path, pairs: PreferenceRows, case: Case) -> Outcome:
    """A step each on the first of `PAIR_STEPS`, on rankings, on numbers, and on the last pairs.

    Then follows a validation on the first pairs. The last step and the validation have the whole
    loss, the first step plain Bradley-Terry.
    """
    ids = [ids for pair in pairs.responses for ids in pair]
    judge = load(model, case.lora, case.freeze)

    def score(token_ids: list[int]) -> Tensor:
        """Of the last token."""
        return judge.score(judge.model(torch.tensor([token_ids]))[0])[0, -1, 0]

    def scores(rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of the chosen and of the rejected responses."""
        better = torch.stack([score(pairs.responses[row][0]) for row in rows])
        return better, torch.stack([score(pairs.responses[row][1]) for row in rows])

    def of_rankings() -> Tensor:
        """Each ranking is the mean over its pairs."""
        losses = []
        for rows in RANKINGS:
            scored = [score(ids[row]) for row in rows]
            of_pairs = [
                (1 + (scored[worse] - scored[better]).exp()).log()
                for better in range(len(rows))
                for worse in range(better + 1, len(rows))
            ]
            losses.append(sum(of_pairs) / len(of_pairs))
        return sum(losses) / len(losses)

    def of_numbers() -> Tensor:
        errors = [score(ids[row]) - target for row, target in enumerate(TARGETS)]
        return sum(error**2 for error in errors) / len(errors)

    def whole_loss(better: Tensor, worse: Tensor, rows: Sequence[int]) -> Tensor:
        """With margins, ties, centring and smoothing."""
        margin = better - worse - torch.tensor([MARGINS[row] for row in rows])
        right = (1 + (TIE_THRESHOLD - margin).exp()).log()
        wrong = (1 + (TIE_THRESHOLD + margin).exp()).log()
        smoothed = (1 - SMOOTHING) * right + SMOOTHING * wrong
        # Of the strengths e^better and e^worse, and theta = e^threshold.
        theta, first, second = math.exp(TIE_THRESHOLD), better.exp(), worse.exp()
        both = (first + theta * second) * (second + theta * first)
        tied = -((theta**2 - 1) * first * second / both).log()
        smoothed = torch.where(torch.tensor([TIES[row] for row in rows]), tied, smoothed)
        return (smoothed + CENTRING * (better + worse) ** 2).mean()

    def step(rows: Sequence[int]) -> tuple[Tensor, dict[str, float]]:
        if not rows:
            return of_rankings(), {}
        if len(rows) == len(TARGETS):
            return of_numbers(), {}
        better, worse = scores(rows)
        margin = better - worse
        loss = (1 + (-margin).exp()).log().mean()
        if rows == PAIR_STEPS[-1]:
            margin = margin[[not TIES[row] for row in rows]]
        metrics = {
            "rm/accuracy": (margin > 0).float().mean().item(),
            "rm/margin": margin.mean().item(),
        }
        if rows == PAIR_STEPS[-1]:
            loss = whole_loss(better, worse, rows)
            metrics["rm/centring"] = ((better + worse) ** 2).mean().item()
        return loss, {"rm/loss": loss.item(), **metrics}

    steps = (PAIR_STEPS[0], (), range(len(TARGETS)), PAIR_STEPS[-1])
    metrics = _train("rm", judge, steps, step, case)
    with torch.no_grad():
        better, worse = scores(range(HELD_OUT))
        margin = better - worse
        metrics["val/loss"] = whole_loss(better, worse, range(HELD_OUT)).item()
    share = (margin > 0).float().mean().item()
    metrics["val/accuracy"] = share
    metrics |= _quality(better.tolist(), worse.tolist(), pairs)
    share = (share * HELD_OUT + 2) / (HELD_OUT + 4)  # Agresti and Coull
    metrics["se/val/accuracy"] = math.sqrt(share * (1 - share) / HELD_OUT)
    return Outcome(metrics, weights_of(judge))


def train_values(model: Path, responses: Sequence[ScoredResponse], case: Case) -> Outcome:
    """One optimizer step for each of `VALUE_STEPS`, and a validation on the first rows."""
    critic = load(model, case.lora, case.freeze)

    def values(response: ScoredResponse) -> Tensor:
        """Before each token that the policy drew."""
        numbers = critic.score(critic.model(torch.tensor([response.token_ids]))[0])[0, :, 0]
        before = numbers[len(response.token_ids) - len(response.drew) - 1 : -1]
        return before[torch.tensor(response.drew)]

    def targets(response: ScoredResponse, lam: float) -> Tensor:
        """Lambda-returns, by their recursion from the end."""
        rewards = [r for r, drew in zip(response.rewards, response.drew, strict=True) if drew]
        after = [*values(response).tolist()[1:], 0.0]
        found: list[float] = []
        target = 0.0
        for reward, value in zip(reversed(rewards), reversed(after), strict=True):
            target = reward + GAMMA * ((1 - lam) * value + lam * target)
            found.insert(0, target)
        return torch.tensor(found)

    def step(rows: Sequence[int]) -> tuple[Tensor, dict[str, float]]:
        lam = LAM if rows == VALUE_STEPS[-1] else 1.0
        errors = [values(responses[row]) - targets(responses[row], lam) for row in rows]
        loss = (torch.cat(errors) ** 2).mean() / 2
        return loss, {"values/vf_loss": loss.item()}

    metrics = _train("values", critic, VALUE_STEPS, step, case)
    with torch.no_grad():
        pairs = [(values(response), targets(response, 1.0)) for response in responses[:HELD_OUT]]
    metrics["val/loss"] = ((torch.cat([v - t for v, t in pairs])) ** 2).mean().item() / 2
    parts: dict[str, list[tuple[float, float]]] = {"": []}
    for predicted, wanted in pairs:
        for i, both in enumerate(zip(predicted.tolist(), wanted.tolist(), strict=True)):
            parts[""].append(both)
            parts.setdefault(f"/quarter_{1 + 4 * i // len(wanted)}", []).append(both)
    for part, numbers in parts.items():
        differences = [target - value for value, target in numbers]
        spread, whole = map(_variance, (differences, [target for _, target in numbers]))
        if len({target for _, target in numbers}) > 1:
            metrics[f"val/explained_var{part}"] = 1 - spread / (whole + 1e-5)
        if part:
            metrics[f"val/bias{part}"] = -sum(differences) / len(differences)
    return Outcome(metrics, weights_of(critic))


def _variance(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((number - mean) ** 2 for number in numbers) / max(1, len(numbers) - 1)


def _quality(better: list[float], worse: list[float], pairs: PreferenceRows) -> dict[str, float]:
    """What is told of the scores of the first pairs."""
    scores = torch.tensor([*better, *worse])
    metrics = {
        "val/score/mean": scores.mean().item(),
        "val/score/std": scores.std(unbiased=False).item(),
    }
    bins: dict[int, float] = {}
    longer: list[tuple[bool, bool]] = []
    for high, low, sides in zip(better, worse, pairs.responses, strict=False):
        sure = 1 / (1 + math.exp(-abs(high - low)))
        place = min(9, int((sure - 0.5) * 20))
        bins[place] = bins.get(place, 0.0) + float(high > low) - sure
        more = len(sides[0]) - len(sides[1])
        if more:
            longer.append((more > 0, (high > low) == (more > 0)))
    metrics["val/calibration_error"] = sum(map(abs, bins.values())) / len(better)
    if longer:
        names = ("val/longer_preferred", "val/longer_scores_higher")
        for name, each in zip(names, zip(*longer, strict=True), strict=True):
            metrics[name] = sum(each) / len(each)
    return metrics


def _train(
    name: str,
    model: Any,
    steps: Sequence[Sequence[int]],
    step: Callable[[Sequence[int]], tuple[Tensor, dict[str, float]]],
    case: Case,
) -> dict[str, float]:
    """Take the steps in order; returns the metrics of the last one."""
    optimizer = make_optimizer(model, case.optimizer)
    routers = Routers(model, case.router_losses)
    metrics: dict[str, float] = {}
    for rows in steps:
        routers.begin()
        loss, metrics = step(rows)
        norm = differentiate(optimizer, model, loss + routers.losses(), case.clip_grad)
        optimizer.step()
        of_step = {"grad_norm": norm, **routers.metrics()}
        metrics |= {f"{name}/{key}": value for key, value in of_step.items()}
    return metrics | {f"{name}/optimizer_steps": 1, f"{name}/skipped_steps": 0, f"{name}/lr": LR}
