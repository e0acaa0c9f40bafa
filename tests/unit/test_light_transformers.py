"""What processes that train leave out of transformers, and that nothing else of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.programs import run_program, succeed

PROGRAM = """
import sys
import mrlhf.data.tokenizer
import mrlhf.models.families

assert "torch._dynamo" not in sys.modules and "transformers.modeling_utils" not in sys.modules

import transformers
from transformers.models.auto import auto_factory

class Foreign(transformers.PreTrainedModel):
    def prepare_inputs_for_generation(self): pass

added = auto_factory.add_generation_mixin_to_remote_model(Foreign)
assert issubclass(added, transformers.GenerationMixin) and hasattr(added, "generate")
from transformers.utils.import_utils import define_import_structure as define

[models] = transformers.models.__path__
for arguments in ((models, "models"), (models + "/__init__.py",)):
    kept, read = define(*arguments), define.__wrapped__(*arguments)
    differ = [(of, kept.get(of), read.get(of)) for of in {*kept, *read}]
    assert kept == read, [both for both in differ if both[1] != both[2]]

mixin = transformers.GenerationMixin
assert mixin.__module__ == "transformers.generation.utils"
assert issubclass(transformers.LlamaForCausalLM, mixin)
assert transformers.AutoModelForCausalLM and transformers.LlamaConfig().num_hidden_layers == 32
"""


def test_tokenizers_come_without_models_and_models_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    succeed(run_program(["-c", PROGRAM]))  # which keeps the names
    assert list(tmp_path.glob("*/transformers_*.names"))
    succeed(run_program(["-c", PROGRAM]))
