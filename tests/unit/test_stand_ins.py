"""megatron-core without a GPU: torch stays unchanged, nothing is imported early.

Bytecode is kept.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrlhf.host.stand_ins import _Rewrite

ROOT = Path(__file__).parents[2]

LAZY = """
import sys
import mrlhf
assert not [name for name in sys.modules if name.startswith("megatron")], "megatron was imported"
assert "torch._dynamo" not in sys.modules, "a compiler was imported"
"""

UNTOUCHED = """
import torch
import torch.cuda, torch.distributed.fsdp, torch.nn.functional, torch.utils.checkpoint
watched = [torch, torch.cuda, torch.Tensor, torch.nn.Module, torch.distributed]
watched += [torch.nn.functional, torch.random]
before = [{name: id(value) for name, value in vars(module).items()} for module in watched]
import mrlhf
from megatron.core.models.gpt import GPTModel
import megatron.core.tensor_parallel.random
import megatron.core.pipeline_parallel.schedules
import megatron.core.optimizer
for module, names in zip(watched, before, strict=True):
    changed = [name for name in names if id(vars(module).get(name)) != names[name]]
    assert not changed, (module, changed)
assert not torch.cuda.is_available()
import megatron.core.jit
def function(): pass
assert megatron.core.jit.jit_fuser(function) is function
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
model_parallel_cuda_manual_seed(5, tp_rank=1, ep_rank=0, etp_rank=0)
outside = torch.get_rng_state()
with get_cuda_rng_tracker().fork():
    inside = torch.rand(3)
assert torch.equal(torch.get_rng_state(), outside)
torch.manual_seed(5 + 2718 + 1)  # megatron-core's seed of tensor-parallel rank 1
assert torch.equal(inside, torch.rand(3))
"""

ROTARY = """
import sys
import mrlhf
from megatron.core.models.gpt import GPTModel
import torch, transformers
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=16, rope_theta=10000.0,
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])
expected = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), expected, atol=1e-7, rtol=1e-6)
"""


TOO_EARLY = """
import sys
import types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
import mrlhf
"""


# Before a program: what fails if a module is rewritten once more.
KEPT = """
import ast
parse = ast.parse
def refuse(source, filename="", *arguments, **options):
    assert "megatron" not in str(filename), filename
    return parse(source, filename, *arguments, **options)
ast.parse = refuse
"""


def run_python(program: str, *arguments: str, **variables: str) -> None:
    """Run `program` in a new interpreter that sees no GPU, with more environment variables."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-W", "error::UserWarning:megatron", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_mrlhf_imports_no_megatron() -> None:
    run_python(LAZY)


def test_torch_is_unchanged_by_importing_megatron_and_its_random_states_work() -> None:
    run_python(UNTOUCHED)


def test_transformers_loads_right_rotary_frequencies_in_the_same_process(tmp_path: Path) -> None:
    run_python(ROTARY, str(tmp_path))


def test_megatron_imported_too_early_is_refused() -> None:
    with pytest.raises(AssertionError, match="import mrlhf first"):
        run_python(TOO_EARLY)


def test_bytecode_is_kept_and_made_again_if_it_is_cut_off(tmp_path: Path) -> None:
    program = "import mrlhf, megatron.core.jit; print(megatron.core.jit.jit_fuser)"
    variables = {"XDG_CACHE_HOME": str(tmp_path)}
    run_python(program, PYTHONDONTWRITEBYTECODE="1", **variables)
    assert not list(tmp_path.rglob("*.pyc"))

    run_python(program, PYTHONDONTWRITEBYTECODE="", **variables)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.pyc")}
    assert len(files) > 50

    run_python(KEPT + program, PYTHONDONTWRITEBYTECODE="", **variables)
    for number, file in enumerate(files):
        file.write_bytes(file.read_bytes()[: number % 2 * 30])
    run_python(UNTOUCHED, PYTHONDONTWRITEBYTECODE="", **variables)
    assert files.keys() <= set(tmp_path.rglob("*.pyc"))
    assert all(file.stat().st_size > 30 for file in files)


def test_no_folder_for_bytecode_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "mrlhf").mkdir()
    (tmp_path / "mrlhf" / "megatron_bytecode").touch()  # a file in its place
    run_python("import mrlhf, megatron.core.jit", XDG_CACHE_HOME=str(tmp_path))


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("torch.cuda.current_device()", "_stand_ins.CUDA_ON_CPU.current_device()"),
        ("fuse = torch.compile", "fuse = _stand_ins.not_compiled"),
        ("torch.zeros(1, device='cuda')", "torch.zeros(1, device='cpu')"),
        ("torch.tensor(x, pin_memory=True)", "torch.tensor(x, pin_memory=False)"),
        ("kind == 'torch.cuda.FloatTensor'", "kind == 'torch.FloatTensor'"),
        ("weight.data.cuda(non_blocking=True)", "weight.data"),
        ("torch.matmul(x, w.t())", "_stand_ins.matmul(x, w.t())"),
        ("grad.t().matmul(x)", "_stand_ins.matmul(grad.t(), x)"),
        ("torch.nn.Module()", "torch.nn.Module()"),
        ("other.cuda.stream", "other.cuda.stream"),
    ],
)
def test_rewriting(source: str, rewritten: str) -> None:
    assert ast.unparse(_Rewrite().visit(ast.parse(source))) == rewritten
