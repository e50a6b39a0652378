"""Compiles the fused kernels for GPUs, without one: python -m tests.support.compile_fused prints a line of JSON for each.

Beside the compilers, the packages of Triton bring what reads registers and instructions out of a program for NVIDIA's GPUs.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if it is not set.

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_ring_attention.compute.fused import backward_kernels, chosen, chosen_kernels, kernels
from hf_ring_attention.compute.fused.choice import settings_for
from hf_ring_attention.compute.fused.tiles import padded_width

#: A device's target of Triton, and the KiB of shared memory of a block of threads.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_100": (GPUTarget("cuda", 100, 32), 227),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
}
KERNELS = {"forward": kernels.forward_kernel, "dq": backward_kernels.dq_kernel, "dkdv": backward_kernels.dkdv_kernel}
CHOSEN = {"chosen": chosen_kernels.chosen_forward_kernel, "chosen back": chosen_kernels.chosen_backward_kernel}
_FLOATS = {"LSE", "DELTA", "PARTS"}
_NUMBERS = {"ITEMS", "REFERENCES", "TILES", "INDEX"}


def compiled(target, name, setting, width, value_width, resume=False, dtype=torch.bfloat16, heads=4):
    """A kernel with a setting, for tensors of bfloat16 whose rows begin at multiples of 16 numbers."""
    gpu, _ = TARGETS[target]
    half = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    constants = {"HEADS": heads, "CAPPED": False, "LOOPS": setting.loops}
    constants |= {"BLOCK_M": setting.rows, "BLOCK_N": setting.keys}
    constants |= {"D": width, "BLOCK_D": padded_width(width), "DV": value_width, "BLOCK_DV": padded_width(value_width)}
    constants |= {"ADD": resume} if name == "dkdv" else {"RESUME": resume, "SMALL": setting.small}
    names, signature, attributes = KERNELS[name].arg_names, {}, {}
    results = {"forward": ["OUT"], "dq": ["DQ"], "dkdv": ["DK", "DV_"]}[name]
    for number, argument in enumerate(names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("inner", "outer", "scale"):
            signature[argument] = "fp32"
        else:
            pointer = "*i32" if argument in _NUMBERS else "*fp32" if argument in _FLOATS else half
            pointer = "*fp32" if argument in results and resume else pointer
            signature[argument] = pointer if argument.isupper() else "i32"
            if not KERNELS[name].params[number].do_not_specialize:
                attributes[(number,)] = [["tt.divisibility", 16]]
    values = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=KERNELS[name], signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": setting.warps, "num_stages": setting.stages}
    return triton.compile(source, target=gpu, options=options)


def compiled_chosen(target, name, width, value_width, group):
    """A kernel of chosen rows for tensors of bfloat16."""
    setting = chosen.FORWARD_BLOCK if name == "chosen" else chosen.BACKWARD_BLOCK
    constants = {"KV_HEADS": 4, "GROUP": group, "ROWS": padded_width(group), "BLOCK_N": setting[0]}
    constants |= {"D": width, "BLOCK_D": padded_width(width), "DV": value_width, "BLOCK_DV": padded_width(value_width)}
    kernel, signature, attributes = CHOSEN[name], {}, {}
    for number, argument in enumerate(kernel.arg_names):
        kind = "*i32" if argument in _NUMBERS else "*fp32" if argument in {*_FLOATS, "DK", "DV_"} else "*bf16"
        kind = kind if argument.isupper() or argument == "DV_" else "fp32" if argument == "scale" else "i32"
        signature[argument] = "constexpr" if argument in constants else kind
        if argument not in constants and kind != "fp32" and not kernel.params[number].do_not_specialize:
            attributes[(number,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": chosen.WARPS, "num_stages": setting[1]}
    return triton.compile(source, target=TARGETS[target][0], options=options)


def settings_of(target, name, width, few):
    """The setting of a kernel in launches whose queries see few keys, many, or in launches of few keys."""
    settings = settings_for(torch.bfloat16, width, target)
    return settings.few_keys if few == "few keys" else getattr(settings, name)[few == "many"]


def facts(kernel, target):
    """Bytes of registers that are spilled, KiB of shared memory, and instructions of tensor cores."""
    shared = kernel.metadata.shared / 1024
    if target == "gfx942":
        text = kernel.asm["amdgcn"]
        spills = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text)[1])
        return {"spills": 4 * spills, "shared": shared, "products": text.count("v_mfma")}
    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([programs / "cuobjdump", option, cubin], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return {
        "spills": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": shared,
        "products": len(re.findall(r"\bHG?MMA\b", code)),
        "of whole warp groups": len(re.findall(r"\bHGMMA\b", code)),
    }


def main():
    """Compiles what the arguments name: target, kernel, widths of keys and values, kind of launch, and adding or not."""
    for wanted in sys.argv[1:]:
        target, name, width, value_width, few, resume = wanted.split(",")
        if name in CHOSEN:
            kernel = compiled_chosen(target, name, int(width), int(value_width), int(few))
            general = [p.name for p in CHOSEN[name].params if p.do_not_specialize]
            print(json.dumps({"wanted": wanted, "general": general, **facts(kernel, target)}), flush=True)
            continue
        setting = settings_of(target, name, max(int(width), int(value_width)), few)
        kernel = compiled(target, name, setting, int(width), int(value_width), resume == "1")
        general = [p.name for p in KERNELS[name].params if p.do_not_specialize]
        print(json.dumps({"wanted": wanted, "general": general, **facts(kernel, target)}), flush=True)


if __name__ == "__main__":
    main()
