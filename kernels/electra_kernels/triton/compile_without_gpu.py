"""Compile every Triton kernel without a GPU, and report the resources that its machine code uses.

`python -m electra_kernels.ahead_of_time --arch 80 90` prints one line for each kernel: registers, stack, shared
memory, and counts of machine instructions. Triton's interpreter checks a kernel's values, but accepts code that the
compiler rejects; this program checks types, spills (stack or local-memory instructions) and the width of loads.

How: it uses Triton's own compiler, assembler and disassembler, and neither a driver nor a GPU.

Cost: 3 s for each kernel on one core.

Limits: TRITON_INTERPRET must not be set. Shapes are those of the large model in bf16: V = 30592, H = 1024 and 256,
S = 512, N = 128.
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
from electra_kernels.triton.replace_tokens import replace_kernel


class KernelCase(NamedTuple):
    """Kernel to compile, with everything that its compilation depends on except the GPU.

    Attributes:
        name: Name of the line in the table.
        kernel: Function decorated by `triton.jit`.
        types: Triton type of each argument, for example "*bf16"; may hold names that the kernel does not have.
        constants: Value of each compile-time argument.
        divisible: Integer arguments that the compiler may assume to be multiples of 16.
        num_warps: Warps of a program.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    num_warps: int


class Compiled(NamedTuple):
    """Resources and instruction counts of one kernel, compiled for one GPU architecture.

    Spills show as a stack or as local accesses. None of our kernels uses tensor cores, so `tensor_core` should be 0.
    """

    name: str
    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    wide_loads: int  # LDG of 128 bits
    wide_stores: int  # STG of 128 bits
    local_accesses: int  # LDL and STL, which are spills
    instructions: int
    tensor_core: int  # HMMA and HGMMA


_SHARED_TYPES = {
    "bias_ptr": "*bf16",
    "loss_ptr": "*fp32",
    "mask_ptr": "*fp32",
    "label_ptr": "*fp32",
    "logits_ptr": "*fp32",
    "positions_ptr": "*i64",
}
_SIZES = ("seq_len", "num_slots", "hidden", "num_tokens")  # multiples of 16 in the large model


def cases() -> list[KernelCase]:
    """Return every kernel with the argument types of the large model's launches in bf16, and two also for fp32."""
    head_cases = _head_cases()
    tail_forward, tail_backward = _tail_cases()
    fp32_cases = [_as_fp32(head_cases[0], "head_train_fp32"), _as_fp32(tail_forward, "tail_fwd_fp32")]
    return [*head_cases, tail_forward, tail_backward, *fp32_cases, *_slot_cases(), *_norm_cases()]


def _head_cases() -> list[KernelCase]:
    """Return the cases of the token head's row kernel: training, evaluation, and sampling alone."""
    types = _SHARED_TYPES | {
        "logits_ptr": "*bf16",
        "target_ptr": "*i64",
        "weight_ptr": "*fp32",
        "row_ptr": "*i64",
        "best_ptr": "*i64",
        "sampled_ptr": "*i64",
        **dict.fromkeys(("stride", "seed_low", "seed_high", "step"), "i32"),
        "inverse_temperature": "fp32",
    }
    switches = {
        "WITH_TEMPERATURE": False,
        "DISALLOW_CORRECT": False,
        "PAIR": False,
        "WIDTH": 30592,
        "BLOCK": mlm_head.BLOCK,
        "APPROXIMATE": True,
    }
    passes = {"head_train": (True, True), "head_evaluate": (True, False), "sample": (False, False)}
    return [
        KernelCase(
            name,
            mlm_head.row_kernel,
            types,
            switches | {"WITH_LOSS": with_loss, "WITH_GRADIENT": with_gradient},
            ("stride",),
            mlm_head.NUM_WARPS,
        )
        for name, (with_loss, with_gradient) in passes.items()
    ]


def _tail_cases() -> tuple[KernelCase, KernelCase]:
    """Return the two cases of the discriminator tail: the forward and the backward kernel."""
    types = _SHARED_TYPES | {
        "dense_ptr": "*bf16",
        "out_weight_ptr": "*bf16",
        "out_bias_ptr": "*bf16",
        "upstream_ptr": "*fp32",
        "grad_dense_ptr": "*bf16",
        **dict.fromkeys(("grad_bias_ptr", "grad_out_weight_ptr", "grad_out_bias_ptr"), "*fp32"),
        "num_tokens": "i32",
        "hidden": "i32",
    }
    tile = {"BLOCK_T": 2, "BLOCK_H": 1024}
    forward, backward = discriminator_tail.tail_forward_kernel, discriminator_tail.tail_backward_kernel
    warps = discriminator_tail.NUM_WARPS
    return (
        KernelCase("tail_forward", forward, types, tile | {"PAIR": False}, _SIZES, warps),
        KernelCase("tail_backward", backward, types, tile, _SIZES, warps),
    )


def _as_fp32(case: KernelCase, name: str) -> KernelCase:
    """Return the case of the same kernel for fp32 tensors, with PAIR set.

    PAIR makes the kernel keep logit + bias as an unevaluated sum of two numbers; bf16 logits need only one.
    """
    types = {argument: kind.replace("bf16", "fp32") for argument, kind in case.types.items()}
    return case._replace(name=name, types=types, constants=case.constants | {"PAIR": True})


def _slot_cases() -> list[KernelCase]:
    """Return the cases of the kernels over masked positions: replace and label, and the masked gather's backward."""
    replace_types = _SHARED_TYPES | {
        "ids_ptr": "*i64",
        "weight_ptr": "*fp32",
        "sampled_ptr": "*i64",
        "corrupted_ptr": "*i64",
        "label_ptr": "*i1",
        "seq_len": "i32",
        "num_slots": "i32",
    }
    gather_types = _SHARED_TYPES | {
        "grad_ptr": "*bf16",
        "out_ptr": "*bf16",
        **dict.fromkeys(("seq_len", "num_slots", "hidden"), "i32"),
    }
    gather_block = {"BLOCK_N": 128, "BLOCK_H": 256}
    return [
        KernelCase("replace", replace_kernel, replace_types, {"BLOCK_S": 64, "BLOCK_N": 128}, _SIZES, 4),
        KernelCase("gather_backward", masked_gather.scatter_add_kernel, gather_types, gather_block, _SIZES, 1),
    ]


def _norm_cases() -> list[KernelCase]:
    """Return the cases of dropout + add + LayerNorm.

    They are forward and backward, at both towers' hidden sizes, with dropout and without (suffix `_p0`).
    """
    types = _SHARED_TYPES | {
        **dict.fromkeys(("x_ptr", "residual_ptr", "grad_ptr", "weight_ptr"), "*bf16"),
        **dict.fromkeys(("out_ptr", "grad_x_ptr", "grad_residual_ptr"), "*bf16"),
        **dict.fromkeys(("mean_ptr", "variance_ptr", "grad_weight_ptr", "grad_bias_ptr"), "*fp32"),
        "row_ptr": "*i64",
        **dict.fromkeys(("num_tokens", "seq_len", "hidden", "step", "site_quads", "limit"), "i32"),
        **dict.fromkeys(("seed_low", "seed_high"), "i32"),
        **dict.fromkeys(("eps", "scale"), "fp32"),
    }
    kernels = {"norm_fwd": dropout_add_norm.norm_forward_kernel, "norm_bwd": dropout_add_norm.norm_backward_kernel}
    warps_of_width = {256: 1, 1024: 4}
    drops = {"": True, "_p0": False}
    return [
        KernelCase(f"{name}_{width}{suffix}", kernel, types, {"DROP": drop, "BLOCK_H": width}, _SIZES, warps)
        for name, kernel in kernels.items()
        for width, warps in warps_of_width.items()
        for suffix, drop in drops.items()
    ]


def compile_case(case: KernelCase, arch: int) -> Compiled:
    """Compile a kernel for compute capability `arch` (80 or 90) and count resources and instructions.

    The machine code comes from Triton's compiler, so its cache applies. TRITON_INTERPRET must not be set.
    """
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
    """Return resource usage and machine code of a kernel as text, by the `cuobjdump` in Triton's package."""
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
    """Return the digits that the first group of `pattern` matches in `text`, the disassembler's report."""
    match = re.search(pattern, text)
    assert match, f"cuobjdump's output has no match of {pattern!r}: adapt the pattern to this version of Triton"
    return match[1]


def table(rows: list[Compiled]) -> str:
    """Return the report as text: Triton's version, a header, and one line for each kernel, in columns of fixed width.

    The test's snapshot (tests/kernels/compiled_kernels.txt) has this form.
    """
    header = (
        f"{'kernel':<16} {'arch':>5} {'regs':>5} {'stack':>6} {'shared':>7} {'ldg128':>7} {'stg128':>7} {'sass':>6}"
    )
    lines = [
        f"{row.name:<16} sm_{row.arch} {row.registers:>5} {row.stack_bytes:>6} {row.shared_bytes:>7} "
        f"{row.wide_loads:>7} {row.wide_stores:>7} {row.instructions:>6}"
        for row in rows
    ]
    return "\n".join([f"triton {triton.__version__}", header, *lines])


def main() -> None:
    """Compile all kernels for the architectures on the command line and print the table; --json writes a file, too."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, e.g. 80 90")
    parser.add_argument("--json", type=Path, help="also write the table's rows to this JSON file")
    arguments = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") != "1", "TRITON_INTERPRET is 1, so kernels are not compiled: unset it"
    rows = [compile_case(case, arch) for arch in arguments.arch for case in cases()]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
