"""What docs/data_and_rewards.md promises to a user's reward function, from the data file on."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rewards.interface import RewardInput
from mrlhf.rewards.rules import ANSWERS, RULES, answer_rules

PAGE = (Path(__file__).parents[2] / "docs" / "data_and_rewards.md").read_text(encoding="utf-8")
ROW = {
    "prompt": "1+2=",
    "ability": "sums",
    "extra_info": {"hint": [1, None], "index": 7},
    "data_source": "own",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, with a tokenizer and one row of a user's data."""
    train_sentencepiece([*"0123456789+="], tmp_path / "tok", vocab_size=32, byte_fallback=False)
    (tmp_path / "own.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_finds_all_that_the_page_lists(place):
    (place / "mine.py").write_text(
        "import json\n"
        "def f(data_source, solution_str, ground_truth, extra_info):\n"
        "    everything = [data_source, solution_str, ground_truth, extra_info]\n"
        "    return {'score': 0, 'pred': json.dumps(everything)}\n"
    )
    data = PromptDataset(["own.jsonl"], load_tokenizer("tok"), max_prompt_length=9, split="val")
    row = data[0]
    given = RewardInput(
        row.data_source[0], row.text[0], "3", row.ground_truth[0], row.extra_info[0], 2
    )
    with closing(RewardFunction([("mine.py:f", 1.0)])) as reward:
        (answer,) = reward.score([given]).answers["f"]
    source, solution, truth, extra_info = json.loads(str(answer))
    assert (source, solution, truth) == ("own", "3", None)
    assert extra_info == {
        "split": "val",
        "index": 7,
        "ability": "sums",
        "hint": [1, None],
        "prompt_text": "1+2=",
        "response_tokens": 2,
    }

    table = PAGE[PAGE.index("| key | content |") : PAGE.index("The function returns a number")]
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert named == set(extra_info) - {"ability", "hint"}


def test_the_example_of_the_page_scores(place):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (place / "mine.py").write_text(example)
    right = RewardInput("own", "1+2=", " 3", "3", {}, 2)
    with closing(RewardFunction([("mine.py:shorter_is_better", 2.0)])) as reward:
        result = reward.score([right])
    assert result.scores == [pytest.approx(1.96)]
    assert result.metrics["shorter_is_better/acc"] == [1.0]


def test_the_rules_that_need_an_answer_are_those_of_the_page():
    assert set(answer_rules([*RULES, "reward_model", "mine.py:f"])) == set(ANSWERS)
    sentence = re.search(r"The terms (.*?)\s+compare\s+the response", PAGE, re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == set(ANSWERS)


def test_numbers_of_other_libraries(place):
    values = ["np.float32(0.5)", "np.int64(1) / 2", "torch.tensor(0.5)", "torch.tensor([[0.5]])"]
    (place / "mine.py").write_text(
        "import numpy as np, torch\n"
        "def f(data_source, solution_str, ground_truth, extra_info):\n"
        f"    score = [{', '.join(values)}][int(solution_str)]\n"
        "    return {'score': score, 'acc': np.bool_(True), 'none': None}\n"
    )
    with closing(RewardFunction([("mine.py:f", 1.0)])) as reward:
        rows = [RewardInput("own", "1+2=", str(i), None, {}, 2) for i in range(4)]
        result = reward.score(rows)
    assert result.scores == [0.5] * 4
    assert result.metrics == {"f": [0.5] * 4, "f/acc": [1.0] * 4}
