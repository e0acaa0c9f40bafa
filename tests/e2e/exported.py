"""What an exported policy answers, by transformers alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.programs import read_lines


def greedy_accuracy(policy: Path, held_out: Path) -> float:
    """Share of the arithmetic prompts in `held_out` that the policy answers right."""
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")

    rows = read_lines(held_out)
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=5,
            do_sample=False,
        )

    responses = output[:, batch["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True))
    return right / len(rows)
