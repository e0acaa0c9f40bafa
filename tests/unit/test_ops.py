"""The trainer's compiled kernels against torch's operators, forward and backward."""

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mrlhf.host import kernels
from mrlhf.models import ops
from mrlhf.models.spec import ClampedSwish

EPS = 1e-5
# Both round float32 sums of a few hundred numbers, in another order.
CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def results(function, inputs, grad):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 1, 192), (5, 1, 3, 20), (300, 1, 64)])
def test_kernels_equal_torch(dtype, shape):
    assert kernels.find(dtype) is not None, "there is no C++ compiler"
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype)

    ours = results(lambda *inputs: ops.rms_norm(*inputs, EPS), (x, weight), grad)
    theirs = results(lambda *inputs: ops.torch_rms_norm(*inputs, EPS), (x, weight), grad)
    half = grad[..., : shape[-1] // 2]
    ours += results(ops.gated, (3 * x,), half)
    theirs += results(ops.torch_gated, (3 * x,), half)

    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype == dtype
        scale = other.abs().max().float().clamp(min=1.0)  # a weight's gradient is a sum over rows
        torch.testing.assert_close(one.float() / scale, other.float() / scale, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_gemma_adds_equals_transformers(dtype):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn((37, 1, 192), generator=generator).to(dtype) for _ in range(2))
    weight = (0.3 * torch.randn(192, generator=generator)).to(dtype)
    config = Gemma3TextConfig(hidden_size=192, intermediate_size=96, num_attention_heads=4)
    norm = Gemma3RMSNorm(192, EPS).to(dtype)

    def theirs_with(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, x)

    ours = results(
        lambda x, weight: ops.wide_rms_norm(x, 1.0 + weight.float(), EPS), (x, weight), grad
    )
    theirs = results(theirs_with, (x, weight), grad)
    gate = Gemma3MLP(config).act_fn
    half = grad[..., :96]
    ours += results(lambda x: ops.gated(x, "gelu_tanh"), (x,), half)
    theirs += results(lambda x: gate(x[..., :96]) * x[..., 96:], (x,), half)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype == dtype
        scale = other.abs().max().float().clamp(min=1.0)
        torch.testing.assert_close(one.float() / scale, other.float() / scale, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_gates_equal_transformers(dtype):
    config = GptOssConfig(hidden_size=8, intermediate_size=96, num_local_experts=2)
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    generator = torch.Generator().manual_seed(0)
    x, grad = (5 * torch.randn((37, 192), generator=generator).to(dtype) for _ in range(2))
    x[0, :6] = torch.tensor([-1e4, 1.0, 1e4, -1e4, -60.0, 1e4])  # gate, up, gate, up …
    own = results(lambda x: ops.gated(x, ClampedSwish(1.702, 7.0)), (x,), grad[:, :96])
    theirs = results(GptOssExperts(config)._apply_gate, (x,), grad[:, :96])
    for one, other in zip(own, theirs, strict=True):
        assert one.dtype == other.dtype == dtype and bool(one.isfinite().all())
        scale = other.abs().max().float().clamp(min=1.0)
        torch.testing.assert_close(one.float() / scale, other.float() / scale, **CLOSE[dtype])


def test_a_weight_of_another_dtype_is_left_to_torch():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 1.5, 64, dtype=torch.bfloat16)

    ours = ops.rms_norm(x, weight, EPS)
    theirs = torch.nn.functional.rms_norm(x, (64,), eps=EPS) * weight.float()
    torch.testing.assert_close(ours, theirs)


def test_a_weight_gradient_of_many_rows_is_not_rounded_away():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, 8, generator=generator)

    _, _, found = results(lambda *inputs: ops.rms_norm(*inputs, EPS), (x, torch.ones(8)), x)
    wide = x.double()
    exact = (wide * wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt()).sum(dim=0)
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=0.0)


def test_several_threads_give_the_rows_that_one_gives():
    threads = torch.get_num_threads()
    x = torch.randn(257, 192, generator=torch.Generator().manual_seed(0))
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            normed = results(lambda *inputs: ops.rms_norm(*inputs, EPS), (x, torch.ones(192)), x)
            found.append((*normed, *results(ops.gated, (x,), x[:, :96])))
    finally:
        torch.set_num_threads(threads)

    one, two = found
    torch.testing.assert_close(one[2], two[2])  # the weight's gradient, a sum over rows
    assert all(torch.equal(a, b) for a, b in zip(one[:2] + one[3:], two[:2] + two[3:], strict=True))
