"""Run by `test_hopper_kernel.py` in processes of its own: Triton decides at its import whether it interprets.

python hopper_kernel.py compile      compiles the kernel for sm_90 and prints what the machine code contains
python hopper_kernel.py interpret    runs it in the interpreter and prints its largest error
"""

from __future__ import annotations

import json
import sys

import torch

from solutions.kernels import flash_hopper
from solutions.kernels.flash_forward import flash_attention_forward_torch

CONSTANTS = {"HEAD_DIM": 128, "CAUSAL": True, "BLOCK_Q": flash_hopper.BLOCK_Q, "BLOCK_K": flash_hopper.BLOCK_K}


def compiled() -> dict[str, object]:
    """Facts about the kernel for fp16 heads of 128 channels on sm_90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    kernel = flash_hopper.flash_hopper_kernel
    constants = {**CONSTANTS, "BLOCK_D": 128}
    names = [parameter.name for parameter in kernel.params]
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        signature[name] = "i32"
        if name in constants:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name == "lse_ptr" else "*fp16"
        if name.endswith("_ptr") or "_stride_" in name:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    code = triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
    return {
        "shared_bytes": code.metadata.shared,
        "matrix_units": "wgmma.mma_async" in code.asm["ptx"],
        "tensor_maps": "cp.async.bulk.tensor" in code.asm["ptx"],
        "specialized_warps": "ttg.warp_specialize" in code.asm["ttgir"],
    }


def interpreted() -> dict[str, object]:
    """The largest errors of the kernel's arithmetic, against the twin in fp32."""
    flash_hopper.suits_hopper = flash_hopper.is_mappable
    flash_hopper.launch = lambda kernel, grid, *args, **meta: kernel[grid](*args, **meta)
    errors = []
    for queries, keys, head_dim, heads, causal in (
        (17, 33, 80, 6, True),
        (150, 140, 64, 2, True),
        (5, 70, 40, 2, False),
    ):
        generator = torch.Generator().manual_seed(queries)
        shapes = [(1, heads, queries, head_dim), (1, 2, keys, head_dim), (1, 2, keys, head_dim)]
        q, k, v = (torch.randn(shape, generator=generator).half() for shape in shapes)
        got = flash_hopper.fastest_attention_forward(q, k, v, causal=causal)
        right = flash_attention_forward_torch(q.float(), k.float(), v.float(), causal=causal)
        for one, other in zip(got, right, strict=True):
            assert torch.equal(one.isinf(), other.isinf())
            errors.append(float((one.float() - other).nan_to_num(0.0).abs().max()))
    return {"errors": errors}


if __name__ == "__main__":
    print(json.dumps({"compile": compiled, "interpret": interpreted}[sys.argv[1]]()))
