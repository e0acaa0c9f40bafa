"""Compiles the Triton kernels for GPUs that are not here, and prints the name of each.

A program of its own, because Triton decides on its first import whether kernels are interpreted.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mrlhf.gpu import attention_kernels, delta_kernels, kernels, launch

L40S, OF_A100 = 99 * 1024, 163 * 1024  # bytes of shared memory of a program; an H100 has 227 KiB
A100, H100 = 80, 90  # compute capability times 10
SIZES = (
    "rows", "size", "group", "dim", "half", "heads", "kv_heads", "sequences", "columns", "blocks",
    "window", "first", "valid", "splits", "per_token", "count", "entries", "shared", "key_dim",
    "value_dim", "ranks", "rank", "more",
)  # fmt: skip
TYPES = {
    **dict.fromkeys([*SIZES, "stride", "key_stride", "table_stride", "token_stride"], "i32"),
    **dict.fromkeys(["outer_stride", "inner_stride"], "i32"),
    **dict.fromkeys(["eps", "sign", "scale", "factor", "beta"], "fp32"),
    **dict.fromkeys(["scales", "sums", "tops", "grad_weights", "cosines", "sines"], "*fp32"),
    **dict.fromkeys(["parts"], "*fp32"),
    **dict.fromkeys(["tables", "query_starts", "lengths"], "*i32"),
    **dict.fromkeys(["positions", "places", "tokens", "targets"], "*i64"),
    **dict.fromkeys(["table", "log_total", "ref_log_total", "entropy", "kl"], "*fp32"),
    **dict.fromkeys(["shares"], "*fp32"),
    **dict.fromkeys(["ends"], "*i32"),
    **dict.fromkeys(["grad_logprobs", "grad_entropy", "grad_kl"], "*fp32"),
    **dict.fromkeys(["summaries", "logprobs", "states"], "*fp32"),
    **dict.fromkeys(["slots"], "*i64"),
    "uniform": "*fp64",
}
DECODE = {
    "GROUP": 4, "HEADS": 4, "PAGE": 64, "QUERIES": 1, "ROWS": 16, "KEYS": 64, "DIM": 128,
    "MORE": 0, "CAP": 0.0,
}  # fmt: skip
PREFILL = DECODE | {"QUERIES": 16, "ROWS": 64, "CAP": 50.0}
OF_LATENTS = {"GROUP": 128, "DIM": 512, "MORE": 64, "CAP": 0.0}  # those of DeepSeek-V3
FORMS: dict[str, list[dict[str, Any]]] = {
    "add_rms_norm": [{"ADDS": True, "BLOCK": 4096}, {"ADDS": False, "BLOCK": 128}],
    "rms_norm_backward": [{"EACH": 32, "BLOCK": 4096}],
    "gated": [{"BLOCK": 1024}],
    "gated_backward": [{"BLOCK": 1024}],
    "rotate": [{"BLOCK": 128}],
    "rotate_store": [{"GROUP": 4, "NORMS": norms, "BLOCK": 128} for norms in (True, False)],
    "paged_attention": [DECODE, PREFILL],  # and those of `check_shared_memory`
    "join_splits": [{"DIM": 128}],
    "logit_blocks": [{"COLUMNS": 1024}],
    "draw": [{"COLUMNS": 1024, "BLOCKS": 256}],
    "delta_step": [{"TAPS": 4, "KEYS": 128, "VALUES": 128}],
    "sort_by_expert": [{"BLOCK": 1024}],
    "join_experts": [{"BLOCK": 1024}],
    "vocab_sums": [{"COLUMNS": 1024, "FORWARD": forward} for forward in (True, False)],
    "vocab_gradient": [
        {"COLUMNS": 1024, "KIND": kind} for kind in ("forward", "reverse", "mixture")
    ],
}


def _functions() -> dict[str, Any]:
    """The kernels by name."""
    found = {**vars(kernels), **vars(attention_kernels), **vars(delta_kernels)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, triton.JITFunction) and not name.startswith("_")
    }


def compile_kernel(
    name: str,
    constants: dict[str, Any],
    architecture: int,
    numbers: str = "bf16",
    stages: int = 3,
    warps: int = 4,
) -> Any:
    """Compile one form of a kernel to the machine code of an architecture."""
    function = _functions()[name]
    signature = {}
    for argument in function.arg_names:
        kind = "constexpr" if argument in constants else TYPES.get(argument, f"*{numbers}")
        signature[argument] = kind
    places = {(function.arg_names.index(key),): value for key, value in constants.items()}
    aligned = {  # as tensors are; loads in several stages need it
        (number,): [["tt.divisibility", 16]]
        for number, argument in enumerate(function.arg_names)
        if argument in ("q", "keys", "values", "out", "dim", "more", "key_stride")
    }
    compiled = triton.compile(
        ASTSource(function, signature, places, aligned),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": 8 if name == "delta_step" else warps, "num_stages": stages},
    )
    assert compiled.asm["cubin"]
    return compiled


def check_shared_memory() -> None:
    """Attention of every width takes less shared memory than an L40S has, and an A100."""
    for kind, itemsize in (("bf16", 2), ("fp32", 4)):
        for form in (DECODE, PREFILL):
            for dim in (64, 128, 256, 512):
                _check_shared_memory(form | {"DIM": dim}, A100, kind, itemsize, L40S)
            of_latents = form | OF_LATENTS
            _check_shared_memory(of_latents, A100, kind, itemsize, L40S)
            _check_shared_memory(of_latents, A100, kind, itemsize, OF_A100)
            _check_shared_memory(of_latents, H100, kind, itemsize, OF_A100)


def _check_shared_memory(
    form: dict[str, Any], architecture: int, kind: str, itemsize: int, shared: int
) -> None:
    decodes = form["QUERIES"] == 1
    width = (form["DIM"] + form["MORE"]) * itemsize
    few = decodes and form["GROUP"] <= 16
    rows, keys, stages, warps = launch.attention_tiles(few, width, shared)
    heads = min(form["GROUP"], rows if decodes else rows // 2)
    constants = form | {"KEYS": keys, "ROWS": 16 if few else rows, "HEADS": heads}
    constants["QUERIES"] = 1 if decodes else rows // heads
    compiled = compile_kernel("paged_attention", constants, architecture, kind, stages, warps)
    assert compiled.metadata.shared <= shared, (kind, constants, compiled.metadata.shared)


def main() -> None:
    """Compile all of them."""
    check_shared_memory()
    public = _functions().keys()
    assert public == set(FORMS), f"kernels without a form here: {public ^ set(FORMS)}"
    for name, forms in FORMS.items():
        for constants in forms:
            compile_kernel(name, constants, H100)
        print(name)


if __name__ == "__main__":
    main()
