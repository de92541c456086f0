"""Compile every Triton kernel for a GPU that is not there, and report what the assembler made of it.

`python -m electra_kernels.ahead_of_time --arch 80 90` prints one line for each kernel: registers, stack, shared
memory, and counts of machine instructions. The interpreter checks a kernel's values and accepts code that the
compiler does not; this checks types, spills (stack or local-memory instructions) and the width of loads. It needs
Triton's own assembler and disassembler, no driver and no GPU: 3 s a kernel on one core. Must run without
TRITON_INTERPRET.

Shapes are those of the large model in bf16: V = 30592, H = 1024 and 256, S = 512, N = 128.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from electra_kernels.triton import discriminator_tail, dropout_add_norm, masked_gather, mlm_head
from electra_kernels.triton.replace import replace_kernel


class KernelCase(NamedTuple):
    """A kernel with its argument types, compile-time values, and the integers known to divide by 16."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    num_warps: int


class Compiled(NamedTuple):
    """What one kernel became."""

    name: str
    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    wide_loads: int  # LDG of 128 bits
    wide_stores: int  # STG of 128 bits
    local_accesses: int  # LDL and STL: spills
    instructions: int
    tensor_core: int  # HMMA and HGMMA: ours have none


def cases() -> list[KernelCase]:
    """Every kernel in the form that the large model launches, and two as fp32 takes them."""
    pointers = {
        "bias_ptr": "*bf16",
        "loss_ptr": "*fp32",
        "mask_ptr": "*fp32",
        "label_ptr": "*fp32",
        "logits_ptr": "*fp32",
        "positions_ptr": "*i64",
    }
    row = pointers | {
        "logits_ptr": "*bf16",
        "target_ptr": "*i64",
        "weight_ptr": "*fp32",
        "row_ptr": "*i64",
        "best_ptr": "*i64",
        "sampled_ptr": "*i64",
        **dict.fromkeys(("stride", "seed_low", "seed_high", "step"), "i32"),
        "inverse_temperature": "fp32",
    }
    tail = pointers | {
        "dense_ptr": "*bf16",
        "out_weight_ptr": "*bf16",
        "out_bias_ptr": "*bf16",
        "upstream_ptr": "*fp32",
        "grad_dense_ptr": "*bf16",
        **dict.fromkeys(("grad_bias_ptr", "grad_out_weight_ptr", "grad_out_bias_ptr"), "*fp32"),
        "num_tokens": "i32",
        "hidden": "i32",
    }
    replace = pointers | {
        "ids_ptr": "*i64",
        "weight_ptr": "*fp32",
        "sampled_ptr": "*i64",
        "corrupted_ptr": "*i64",
        "label_ptr": "*i1",
        "seq_len": "i32",
        "num_slots": "i32",
    }
    gather = pointers | {
        "grad_ptr": "*bf16",
        "out_ptr": "*bf16",
        **dict.fromkeys(("seq_len", "num_slots", "hidden"), "i32"),
    }
    norm = pointers | {
        **dict.fromkeys(("x_ptr", "residual_ptr", "grad_ptr", "weight_ptr"), "*bf16"),
        **dict.fromkeys(("out_ptr", "grad_x_ptr", "grad_residual_ptr"), "*bf16"),
        **dict.fromkeys(("mean_ptr", "variance_ptr", "grad_weight_ptr", "grad_bias_ptr"), "*fp32"),
        "row_ptr": "*i64",
        **dict.fromkeys(("num_tokens", "seq_len", "hidden", "step", "site_quads", "limit"), "i32"),
        **dict.fromkeys(("seed_low", "seed_high"), "i32"),
        **dict.fromkeys(("eps", "scale"), "fp32"),
    }
    switches = {
        "WITH_TEMPERATURE": False,
        "DISALLOW_CORRECT": False,
        "PAIR": False,
        "WIDTH": 30592,
        "BLOCK": mlm_head.BLOCK,
        "APPROXIMATE": True,
    }
    tail_blocks = {"BLOCK_T": 2, "BLOCK_H": 1024}
    row_kernel, warps = mlm_head.row_kernel, mlm_head.NUM_WARPS
    tail_warps = discriminator_tail.NUM_WARPS
    tail_forward = discriminator_tail.tail_forward_kernel
    tail_backward = discriminator_tail.tail_backward_kernel
    shapes = ("seq_len", "num_slots", "hidden", "num_tokens")
    return [
        KernelCase("head_train", row_kernel, row, switches | _passes(True, True), ("stride",), warps),
        KernelCase("head_evaluate", row_kernel, row, switches | _passes(True, False), ("stride",), warps),
        KernelCase("sample", row_kernel, row, switches | _passes(False, False), ("stride",), warps),
        KernelCase("tail_forward", tail_forward, tail, tail_blocks | {"PAIR": False}, shapes, tail_warps),
        KernelCase("tail_backward", tail_backward, tail, tail_blocks, shapes, tail_warps),
        *(
            case._replace(
                name=f"{case.name}_fp32",
                types={name: kind.replace("bf16", "fp32") for name, kind in case.types.items()},
                constants=case.constants | {"PAIR": True},
            )
            for case in (
                KernelCase("head_train", row_kernel, row, switches | _passes(True, True), ("stride",), warps),
                KernelCase("tail_fwd", tail_forward, tail, tail_blocks, shapes, tail_warps),
            )
        ),
        KernelCase("replace", replace_kernel, replace, {"BLOCK_S": 64, "BLOCK_N": 128}, shapes, 4),
        KernelCase(
            "gather_backward",
            masked_gather.scatter_add_kernel,
            gather,
            {"BLOCK_N": 128, "BLOCK_H": 256},
            shapes,
            1,
        ),
        *(
            KernelCase(f"{name}_{width}{suffix}", kernel, norm, {"DROP": drop, "BLOCK_H": width}, shapes, warps)
            for name, kernel in (
                ("norm_fwd", dropout_add_norm.norm_forward_kernel),
                ("norm_bwd", dropout_add_norm.norm_backward_kernel),
            )
            for width, warps in ((256, 1), (1024, 4))
            for suffix, drop in (("", True), ("_p0", False))
        ),
    ]


def _passes(with_loss: bool, with_gradient: bool) -> dict[str, Any]:
    return {"WITH_LOSS": with_loss, "WITH_GRADIENT": with_gradient}


def compile_case(case: KernelCase, arch: int) -> Compiled:
    """Compile for compute capability `arch` (80, 90) and read the machine code."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in case.divisible]
    source = ASTSource(
        case.kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": case.num_warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage, code = _disassemble(compiled.asm["cubin"])
    return Compiled(
        name=case.name,
        arch=arch,
        registers=int(_number(r"REG:(\d+)", usage)),
        stack_bytes=int(_number(r"STACK:(\d+)", usage)),
        shared_bytes=compiled.metadata.shared,
        wide_loads=len(re.findall(r"\bLDG\S*\.128", code)),
        wide_stores=len(re.findall(r"\bSTG\S*\.128", code)),
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", code, re.MULTILINE)),
        tensor_core=len(re.findall(r"\bHG?MMA", code)),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code as text, by the disassembler that Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    return usage, code


def _number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"no {pattern} in the disassembler's output"
    return match[1]


def table(rows: list[Compiled]) -> str:
    """One line for each kernel, widths fixed, for people and for the snapshot."""
    header = (
        f"{'kernel':<16} {'arch':>5} {'regs':>5} {'stack':>6} {'shared':>7} {'ldg128':>7} {'stg128':>7} {'sass':>6}"
    )
    lines = [
        f"{r.name:<16} sm_{r.arch} {r.registers:>5} {r.stack_bytes:>6} {r.shared_bytes:>7} "
        f"{r.wide_loads:>7} {r.wide_stores:>7} {r.instructions:>6}"
        for r in rows
    ]
    return "\n".join([f"triton {triton.__version__}", header, *lines])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, e.g. 80 90")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") != "1", "unset TRITON_INTERPRET: it replaces the compiler"
    rows = [compile_case(case, arch) for arch in arguments.arch for case in cases()]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
