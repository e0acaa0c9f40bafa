"""Compiles the Triton kernels for GPUs that are not here, and prints the name of each.

A program of its own, because Triton decides on its first import whether kernels are interpreted.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mrlhf.gpu import kernels

ARCHITECTURES = (80, 90)  # A100; H100 and H200
SIZES = (
    "rows", "size", "group", "dim", "half", "kv_heads", "sequences", "columns", "blocks", "window",
    "first", "valid", "splits",
)  # fmt: skip
TYPES = {
    **dict.fromkeys([*SIZES, "stride", "table_stride", "token_stride"], "i32"),
    **dict.fromkeys(["outer_stride", "inner_stride"], "i32"),
    **dict.fromkeys(["eps", "sign", "scale", "factor"], "fp32"),
    **dict.fromkeys(["scales", "sums", "tops", "grad_weights", "cosines", "sines"], "*fp32"),
    **dict.fromkeys(["parts"], "*fp32"),
    **dict.fromkeys(["tables", "query_starts", "lengths", "likeliest"], "*i32"),
    **dict.fromkeys(["positions", "places", "tokens", "targets"], "*i64"),
    **dict.fromkeys(["table", "log_total", "ref_log_total", "entropy", "kl"], "*fp32"),
    **dict.fromkeys(["grad_logprobs", "grad_entropy", "grad_kl"], "*fp32"),
    "uniform": "*fp64",
    "logprobs": "*fp32",
}
DECODE = {"GROUP": 4, "PAGE": 64, "QUERIES": 1, "ROWS": 16, "KEYS": 64, "DIM": 128}
PREFILL = DECODE | {"QUERIES": 16, "ROWS": 64}
FORMS: dict[str, list[dict[str, Any]]] = {
    "add_rms_norm": [{"ADDS": True, "BLOCK": 4096}, {"ADDS": False, "BLOCK": 128}],
    "rms_norm_backward": [{"EACH": 32, "BLOCK": 4096}],
    "gated": [{"BLOCK": 1024}],
    "gated_backward": [{"BLOCK": 1024}],
    "rotate": [{"BLOCK": 128}],
    "rotate_store": [{"GROUP": 4, "NORMS": norms, "BLOCK": 128} for norms in (True, False)],
    "paged_attention": [DECODE, PREFILL],
    "join_splits": [{"DIM": 128}],
    "logit_blocks": [{"COLUMNS": 1024}],
    "draw": [{"COLUMNS": 1024, "BLOCKS": 256}],
    "vocab_sums": [{"COLUMNS": 1024}],
    "vocab_gradient": [{"COLUMNS": 1024}],
}


def compile_kernel(name: str, constants: dict[str, Any], architecture: int) -> None:
    """Compile one form of a kernel on bfloat16 to the machine code of an architecture."""
    function = getattr(kernels, name)
    signature = {}
    for argument in function.arg_names:
        signature[argument] = "constexpr" if argument in constants else TYPES.get(argument, "*bf16")
    places = {(function.arg_names.index(key),): value for key, value in constants.items()}
    compiled = triton.compile(
        ASTSource(function, signature, places), target=GPUTarget("cuda", architecture, 32)
    )
    assert compiled.asm["cubin"]


def main() -> None:
    """Compile all of them."""
    public = {
        name
        for name, value in vars(kernels).items()
        if isinstance(value, triton.JITFunction) and not name.startswith("_")
    }
    assert public == set(FORMS), f"kernels without a form here: {public ^ set(FORMS)}"
    for name, forms in FORMS.items():
        for constants in forms:
            for architecture in ARCHITECTURES:
                compile_kernel(name, constants, architecture)
        print(name)


if __name__ == "__main__":
    main()
