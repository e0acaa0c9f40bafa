"""transformers and we score the same token of a response, whoever wrote the reward model."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mrlhf.batch import Prompts, Rollout, Sequences
from mrlhf.config.critic import ScalarOptimSection
from mrlhf.config.frozen import RewardModelSection
from mrlhf.config.pair_losses import RewardLossSection
from mrlhf.config.roots import TrainedModelSection
from mrlhf.data.preferences import PreferenceRows
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.models.families import load_spec
from mrlhf.models.spec import ModelSpec
from mrlhf.models.weight_files import head_bias
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.roles.reward_model import RewardModel, score_sequences, up_to_scored, with_pad_token
from mrlhf.run.export import ExportedModel, export_checkpoint
from mrlhf.trainers.reward_model import PreferenceLearning
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import CPU
from tests.oracle.plain_models import SIZES
from tests.oracle.plain_optimizer import (
    BETAS,
    EPS,
    LR,
    WEIGHT_DECAY,
    differentiate,
    make_optimizer,
)
from tests.padding import pad_responses
from tests.ranks import run_ranks
from tests.rollouts import make_rollout, with_holes
from tests.shards import tiny_spec
from tests.tiny_task import write_tiny_task

EOS = 2
FREQUENT = 7  # a token of the text
STEPS = "steps"  # a token classifier with one label, and a bias
SEVERAL = ("several", "other heads")
LABELS = ("helpfulness", "correctness", "verbosity")
WEIGHTS = {"verbosity": -0.5, "helpfulness": 2.0}  # in another order than the labels
# The numbers of each sequence for the labels in training; None where it has none.
TARGETS = [
    [3.0, None, 1.0],
    [None, 0.5, None],
    [2.0, 2.0, 2.0],
    [-1.0, None, None],
    [None, None, 0.0],
    [1.5, -2.0, None],
    [None, 1.0, 1.0],
    [0.0, 3.0, None],
]
STATED_PADS = {"null": None, "eos": EOS, "other": 0, "frequent": FREQUENT, "negative": -1}
TOKENIZER_PADS = {"none": None, "end": "eos", "own": "pad"}
# What the exported config.json says, by the reward model's own pad and the tokenizer's.
EXPORTED = {
    ("null", "none"): EOS,
    ("null", "end"): EOS,
    ("null", "own"): 0,
    ("other", "none"): 0,
    ("other", "end"): 0,
    ("frequent", "own"): FREQUENT,
    ("eos", "own"): EOS,
    ("negative", "none"): EOS,
}
STEP_ROWS = [(0, 1, 2, 4, 6), (3, 5, 7, 1)]
SEQUENCES = [
    [5, 9, 11, EOS],
    [5, 9, 11, EOS, EOS, EOS],
    [5, 9, 11],
    [5, FREQUENT, 11, FREQUENT],
    [5, 11, FREQUENT, FREQUENT, EOS],
    [EOS, EOS],
    [5, 0, 9, 0],
    [FREQUENT],
]


def _save_models(root: Path) -> None:
    for name, pad in STATED_PADS.items():
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            **SIZES, num_labels=1, pad_token_id=pad, eos_token_id=EOS, initializer_range=0.3
        )
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        model.save_pretrained(root / name)
    config.pad_token_id = None  # a padding token would learn nothing there
    for name in SEVERAL:
        label2id = {label: number for number, label in enumerate(LABELS)}
        config.id2label = {number: label for label, number in label2id.items()}
        config.label2id = label2id
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        model.save_pretrained(root / name)
    config.num_labels = 1
    steps = transformers.AutoModelForTokenClassification.from_config(config)
    torch.nn.init.constant_(steps.score.bias, 0.75)
    steps.save_pretrained(root / STEPS)


def _save_tokenizers(root: Path) -> None:
    """The task's tokenizer with another padding token than its own, or without one."""
    write_tiny_task(root / "data")
    backend = transformers.AutoTokenizer.from_pretrained(root / "data" / "tokenizer")
    assert (backend.pad_token_id, backend.eos_token_id) == (0, EOS)
    pads = {"none": None, "end": backend.eos_token, "own": backend.pad_token}
    for name, pad in pads.items():
        backend.pad_token = pad
        backend.save_pretrained(root / f"tokenizer-{name}")


def _theirs(path: Path, pad: int | None) -> Tensor:
    """transformers' scores, in one padded batch where it can, and one at a time where it cannot.

    Those of a model with several heads are [sequences, heads].
    """
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        alone = [model(torch.tensor([tokens])).logits[0].squeeze() for tokens in SEQUENCES]
        if pad is not None and pad >= 0:
            width = max(map(len, SEQUENCES))
            padded = [tokens + [pad] * (width - len(tokens)) for tokens in SEQUENCES]
            mask = [[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in SEQUENCES]
            scores = model(torch.tensor(padded), attention_mask=torch.tensor(mask)).logits.squeeze()
            torch.testing.assert_close(scores, torch.stack(alone), rtol=0, atol=1e-5)
    return torch.stack(alone)


def _in_ranks(rank: int, world_size: int, root: str) -> dict[str, list[float]]:
    scores = {}
    factory = GroupFactory(timeout_s=600.0)

    for tp in (1, world_size):
        groups = factory.role_groups(ParallelLayout(tp=tp, pp=1, dp=world_size // tp))
        for name in STATED_PADS:
            section = RewardModelSection(path=f"{root}/{name}", tp=tp, dtype="float32")
            spec = load_spec(section.path, "scalar")
            engine = ModelEngine(section, spec, groups, CPU)
            engine.load(section.path, seed=0, needs_head=True)
            scores[f"{name} tp {tp}"] = score_sequences(engine, _flat(SEQUENCES))[0].tolist()
            for tokenizer in TOKENIZER_PADS:
                if (name, tokenizer) in EXPORTED:
                    _export(engine, tokenizer, Path(root) / f"{name}-{tokenizer}-tp{tp}", scores)
        section = RewardModelSection(path=f"{root}/{STEPS}", tp=tp, dtype="float32")
        spec = load_spec(section.path, "scalar")
        engine = ModelEngine(section, spec, groups, CPU)
        engine.load(section.path, seed=0, needs_head=True)
        model = RewardModel([(engine, head_bias(section.path))], ends=[FREQUENT, EOS])
        scores[f"{STEPS} tp {tp}"] = model.step_scores(_steps_rollout()).tolist()
    for name, sizes in {"tp": {"tp": 2}, "pp": {"pp": 2}, "dp": {}}.items():
        _several(name, sizes, Path(root), factory, scores)
    return scores


def _several(
    name: str, sizes: dict[str, int], root: Path, factory: GroupFactory, scores: dict[str, Any]
) -> None:
    """Score with an ensemble of models with three heads, then train one of them and export it."""
    layout = ParallelLayout(**{"tp": 1, "pp": 1, **sizes, "dp": 1 if sizes else 2})
    groups = factory.role_groups(layout)
    keys: dict[str, Any] = {"dtype": "float32", "micro_batch_tokens": 16, **sizes}
    engines = []
    for model in SEVERAL:
        section = TrainedModelSection(path=f"{root}/{model}", **keys)
        engine = ModelEngine(section, load_spec(section.path, "scalar"), groups, CPU)
        engine.load(section.path, seed=0, needs_head=True)
        engines.append(engine)

    members = [(engine, head_bias(engine.path)) for engine in engines]
    total, further = RewardModel(members, "min", heads=WEIGHTS).score(_steps_rollout())
    scores[f"{name} raw"] = score_sequences(engines[0], _flat(SEQUENCES)).T.tolist()
    scores[f"{name} total"] = total.tolist()
    scores[f"{name} further"] = {key: column.tolist() for key, column in further.items()}

    trained = engines[0]
    optim = {"weight_decay": WEIGHT_DECAY, "adam_eps": EPS, "clip_grad": 0.0}
    betas = {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1]}
    trained.attach_optimizer(ScalarOptimSection(lr=LR, **optim, **betas), total_updates=2)
    numbers = [[math.nan if x is None else x for x in row] for row in TARGETS]
    targets = torch.tensor(numbers)
    rows = PreferenceRows([[ids] for ids in SEQUENCES], [1] * len(targets), targets=targets)
    task = PreferenceLearning(
        RewardLossSection(rows="targets", target_column=[*LABELS]), rows, rows
    )
    steps = [task.step(trained, some) for some in STEP_ROWS]
    scores[f"{name} losses"] = [metrics["rm/loss"] for metrics in steps]
    scores[f"{name} told"] = task.validate(trained)
    tokenizer = load_tokenizer(root / "tokenizer-own")
    export_checkpoint(ExportedModel(trained, tokenizer, max_shard_mb=100), root / f"{name}-trained")


def _steps_rollout() -> Rollout:
    """All but the first token of each sequence is its response; one is told in the fourth."""
    ids, mask = pad_responses([tokens[1:] for tokens in SEQUENCES], torch.int32)
    size = len(SEQUENCES)
    prompts = Prompts(
        [tokens[:1] for tokens in SEQUENCES],
        list(range(size)),
        [""] * size,
        [""] * size,
        [None] * size,
        [{}] * size,
    )
    stopped = torch.ones(size, dtype=torch.bool)
    rollout = make_rollout(prompts, [0] * size, ids, mask, torch.zeros(mask.shape), stopped)
    return with_holes(rollout, (torch.arange(size) == 3)[:, None] & (ids == FREQUENT))


def _export(
    engine: ModelEngine, name: str, directory: Path, scores: dict[str, list[float]]
) -> None:
    """Give the model a padding token as training does, score with it, and export it."""
    tokenizer = load_tokenizer(directory.parent / f"tokenizer-{name}")
    stated = engine.spec
    engine.spec = with_pad_token(stated, tokenizer.pad_id, tokenizer.ids)
    scores[directory.name] = score_sequences(engine, _flat(SEQUENCES))[0].tolist()
    export_checkpoint(ExportedModel(engine, tokenizer, max_shard_mb=100), directory)
    engine.spec = stated


def _flat(rows: list[list[int]]) -> Sequences:
    return Sequences.of(rows, [1] * len(rows))


def _scored(rows: list[list[int]], spec: ModelSpec) -> list[list[int]]:
    return [tokens.tolist() for tokens in up_to_scored(_flat(rows), spec)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Where the models are, and our scores."""
    root = tmp_path_factory.mktemp("scores")
    _save_models(root)
    _save_tokenizers(root)
    ours, others = run_ranks(2, _in_ranks, str(root))
    assert ours == others
    return root, ours


@pytest.mark.parametrize("name", STATED_PADS)
def test_their_models_have_their_scores_here(run: Any, name: str) -> None:
    root, ours = run
    theirs = _theirs(root / name, STATED_PADS[name])
    assert theirs.std() > 0.05  # a token more or less makes a difference
    for tp in (1, 2):
        torch.testing.assert_close(torch.tensor(ours[f"{name} tp {tp}"]), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "tokenizer"), EXPORTED)
@pytest.mark.parametrize("tp", [1, 2])
def test_our_models_have_our_scores_there(run: Any, model: str, tokenizer: str, tp: int) -> None:
    root, ours = run
    path = root / f"{model}-{tokenizer}-tp{tp}"
    config = json.loads((path / "config.json").read_text())
    pad = EXPORTED[model, tokenizer]
    assert config["pad_token_id"] == pad
    # What pads with the exported tokenizer pads with the token that is not scored.
    assert transformers.AutoTokenizer.from_pretrained(path).pad_token_id == pad
    scores = torch.tensor(ours[path.name])
    torch.testing.assert_close(scores, _theirs(path, pad), rtol=0, atol=1e-5)


def test_several_heads_are_theirs_and_their_weighted_sum_scores(run: Any) -> None:
    root, ours = run
    first, second = (_theirs(root / name, -1) for name in SEVERAL)
    assert first.shape == (len(SEQUENCES), len(LABELS)) and first.std(0).min() > 0.05
    sums = [2.0 * each[:, 0] - 0.5 * each[:, 2] for each in (first, second)]
    mean = (first + second) / 2
    wanted = {"helpfulness": mean[:, 0], "verbosity": mean[:, 2]}
    wanted["std"] = torch.stack(sums).std(0, unbiased=False)
    for name in ("tp", "pp", "dp"):
        # One token is told in the fourth response, and scored all the same.
        near(ours[f"{name} raw"], first)
        near(ours[f"{name} total"], torch.minimum(*sums))
        assert ours[f"{name} further"].keys() == wanted.keys()
        for key, column in wanted.items():
            near(ours[f"{name} further"][key], column)


def test_heads_learn_from_the_rows_that_have_their_number(run: Any) -> None:
    root, ours = run
    model = transformers.AutoModelForSequenceClassification.from_pretrained(root / SEVERAL[0])
    optimizer = make_optimizer(model)

    def errors(row: int) -> list[tuple[int, torch.Tensor]]:
        """Each head that has a number, and how far it is off."""
        logits = model(torch.tensor([SEQUENCES[row]])).logits[0]
        given = [(head, x) for head, x in enumerate(TARGETS[row]) if x is not None]
        return [(head, logits[head] - x) for head, x in given]

    losses = []
    for rows in STEP_ROWS:
        squares = [error**2 for row in rows for _, error in errors(row)]
        loss = sum(squares) / len(squares)
        differentiate(optimizer, model, loss, clip_grad=0.0)
        optimizer.step()
        losses.append(float(loss))
    with torch.no_grad():
        left = [each for row in range(len(TARGETS)) for each in errors(row)]
        logits = torch.stack([model(torch.tensor([ids])).logits[0] for ids in SEQUENCES])

    for name in ("tp", "pp", "dp"):
        near(ours[f"{name} losses"], torch.tensor(losses))
        told = ours[f"{name} told"]
        mean = sum(float(x) ** 2 for _, x in left) / len(left)
        assert told["val/loss"] == pytest.approx(mean, rel=1e-4)
        for head, label in enumerate(LABELS):
            own = [float(error) for number, error in left if number == head]
            error = sum(x**2 for x in own) / len(own)
            assert told[f"val/squared_error/{label}"] == pytest.approx(error, rel=1e-4)
            given = [row for row, numbers in enumerate(TARGETS) if numbers[head] is not None]
            pairs = [logits[given, head].tolist(), [TARGETS[row][head] for row in given]]
            assert told[f"val/correlation/{label}"] == pytest.approx(
                statistics.correlation(*pairs), rel=1e-3
            )
            mean = logits[:, head].mean().item()
            assert told[f"val/score/{label}/mean"] == pytest.approx(mean, rel=1e-4)

        path = root / f"{name}-trained"
        config = transformers.AutoConfig.from_pretrained(path)
        assert (config.num_labels, [*config.id2label.values()]) == (3, [*LABELS])
        assert config.label2id["verbosity"] == 2
        near(_theirs(path, -1), logits)


def near(ours: Any, theirs: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(ours), theirs, rtol=0, atol=2e-5)


def test_each_step_has_the_logit_of_their_token_classifier(run: Any) -> None:
    root, ours = run
    model = transformers.AutoModelForTokenClassification.from_pretrained(root / STEPS)
    wanted = torch.zeros(_steps_rollout().shape)
    for row, tokens in enumerate(SEQUENCES):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :, 0]
        for place, token in enumerate(tokens[1:]):
            if token == EOS or (token == FREQUENT and row != 3):
                wanted[row, place] = logits[1 + place]
    assert (wanted != 0).sum() == 8 and wanted[wanted != 0].std() > 0.05
    for tp in (1, 2):
        found = torch.tensor(ours[f"{STEPS} tp {tp}"])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_the_token_that_is_scored(run: Any) -> None:
    root, _ = run
    spec = load_spec(root / "eos", "scalar")
    assert _scored(SEQUENCES[:3], spec) == [[5, 9, 11]] * 3
    assert _scored([[EOS, EOS], [3, EOS, 4], [EOS]], spec) == [[EOS], [3, EOS, 4], [EOS]]
    assert _scored(SEQUENCES, load_spec(root / "null", "scalar")) == SEQUENCES


@pytest.mark.parametrize(("own", "kept"), [(30, 30), (5, 2), (None, 2), (-1, 2)])
def test_a_pad_that_the_tokenizer_has_stays(own: int | None, kept: int) -> None:
    """The tokenizer has four tokens, and gaps between their ids."""
    stated = tiny_spec("llama", "scalar")
    spec = replace(stated, hf_config={**stated.hf_config, "pad_token_id": own})
    assert with_pad_token(spec, 2, {1, 2, 29, 30}).hf_config["pad_token_id"] == kept
