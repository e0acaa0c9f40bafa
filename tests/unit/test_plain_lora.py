"""The oracle of adapters is peft's: the same logits, and the same gradients of both factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from tests.oracle.plain_lora import PREFIX, Added, adapter_of, separated
from tests.oracle.plain_models import MIXTURES, MODELS, load, save_models


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_models(path)
    return path


# peft adapts experts of gpt-oss alone in the form in which they are here.
@pytest.mark.parametrize("model", [name for name in MODELS if name not in MIXTURES[:-1]])
def test_the_oracle_is_peft(root: Path, model: str) -> None:
    ours = load(root / model, adapted=True)
    theirs = PeftModel.from_pretrained(load(root / model), adapter_of(root / model))
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_("lora_" in name)

    tokens = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = [each(tokens).logits for each in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    for each in logits:
        each.log_softmax(dim=-1)[..., 3].sum().backward()

    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    gradients = separated(gradients, load(root / model))
    compared = 0
    for module in ours.modules():
        if isinstance(module, Added):
            for name, a, b in zip(module.names, module.first, module.second, strict=True):
                for factor, mine in (("A", a), ("B", b)):
                    wanted = gradients[f"{name}.lora_{factor}.weight"]
                    torch.testing.assert_close(mine.grad, wanted, rtol=1e-4, atol=1e-4)
                    compared += 1
    assert compared == len(gradients) > 0
    assert all(name.startswith(PREFIX) for name in gradients)
