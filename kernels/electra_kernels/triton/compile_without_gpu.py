"""Compile every Triton kernel without a GPU, and report the resources that its machine code uses.

`python -m electra_kernels.triton.compile_without_gpu --arch 80 90 100` prints one line for each kernel: registers,
stack, shared memory, and counts of machine instructions, or the compiler's error. Triton's interpreter checks values
but accepts code that the compiler rejects. This program compiles the code; its report shows spills (registers moved to
memory) and the width of loads.

How: it uses Triton's own compiler, assembler and disassembler, and neither a driver nor a GPU.

Cost: 0.6 s for each kernel on one core.

Limits: TRITON_INTERPRET must not be set. Shapes are those of ELECTRA-Large in bf16: vocabulary V = 30592, hidden
sizes H = 1024 and 256, S = 512 tokens in a row, N = 130 masked positions in a row; those of the architecture `modern`
are of configs/modern_400m.yaml. `tests/kernels/test_launches.py` compares them with the launches of both models.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from electra_kernels.triton import (
    discriminator_tail,
    keyed_dropout,
    layer_passes,
    mlm_head,
    modern_layer,
    qkv_gradient,
    slots,
    strip_sums,
)

ARCHITECTURES = (80, 90, 100)  # compute capabilities of A100, H100 and H200, B200
DTYPES = ("bf16", "fp16", "fp32")
_WARP_SIZE = 32  # threads


class KernelCase(NamedTuple):
    """One Triton kernel with the argument types and constants to compile it for, but without the GPU architecture."""

    name: str  # first column of the printed table
    kernel: Any  # function decorated by `triton.jit`
    types: dict[str, str]  # Triton type of each argument that is no constant, for example "*bf16"
    constants: dict[str, Any]  # value of each compile-time argument
    divisible: list[str]  # integer arguments that the compiler may assume to be multiples of 16
    num_warps: int  # of a program (thread block)
    dtype: str = "bf16"  # of the model's tensors, one of `DTYPES`; "int64" for a kernel that has none of them


class Compiled(NamedTuple):
    """Resources and instruction counts of one kernel, compiled for one GPU architecture.

    Values that do not fit into registers are spilled to memory, which shows as a stack or as local accesses. None of
    our kernels uses tensor cores, so `tensor_core` should be 0.
    """

    name: str
    dtype: str
    arch: int  # compute capability, for example 90 for 9.0
    registers: int  # of a thread
    stack_bytes: int  # of a thread
    shared_bytes: int  # of a thread block
    wide_loads: int  # LDG of 128 bits
    wide_stores: int  # STG of 128 bits
    local_accesses: int  # LDL and STL, which are spills
    instructions: int  # all instructions of the machine code
    tensor_core: int  # HMMA and HGMMA


class Refused(NamedTuple):
    """A kernel that this version of Triton does not compile for one GPU architecture."""

    name: str
    dtype: str
    arch: int  # compute capability, for example 90 for 9.0
    error: str  # type of the exception and the last line of its message


# Type -> arguments that have it in every kernel of a bf16 model, except where a case says otherwise.
_TYPES = {
    "*bf16": (
        *("x_ptr", "residual_ptr", "grad_ptr", "out_ptr", "grad_x_ptr", "grad_residual_ptr", "weight_ptr", "bias_ptr"),
        *("dense_ptr", "out_weight_ptr", "out_bias_ptr", "grad_dense_ptr", "logits_ptr", "total_ptr"),
        *("query_ptr", "value_ptr", "joined_ptr", "qkv_ptr", "expanded_ptr"),
    ),
    "*fp32": (
        *("loss_ptr", "mask_ptr", "label_ptr", "upstream_ptr", "statistics_ptr", "partials_ptr", "cos_ptr", "sin_ptr"),
    ),
    "*i64": (
        *("ids_ptr", "target_ptr", "row_ptr", "key_ptr", "best_ptr", "sampled_ptr", "corrupted_ptr", "wanted_ptr"),
        *("position_ptr", "positions_ptr", "input_ptr"),
    ),
    "i32": (
        *("num_tokens", "seq_len", "num_slots", "hidden", "width", "num_columns", "first_column", "num_strips"),
        *("stride", "num_elements", "num_rotated", "layer_quads", "site_quads", "limit"),
        *("pad", "cls", "sep", "mask", "last_shown"),
    ),
    "fp32": ("inverse_temperature", "eps", "scale", "direction"),
}
_TYPE_OF = {argument: triton_type for triton_type, arguments in _TYPES.items() for argument in arguments}
# Arguments that are multiples of 16 in ELECTRA-Large.
_DIVISIBLE = {
    *("seq_len", "hidden", "width", "num_tokens", "num_columns", "first_column", "layer_quads", "stride"),
    "num_elements",
}
_WARPS = {256: 1, 1024: 4}  # hidden size -> warps of a kernel whose program holds whole rows
_ALSO_FP32 = ("head_train", "tail_forward", "sum_strips")


def cases(all_dtypes: bool = False) -> list[KernelCase]:
    """Return the kernels to compile, in the order of the printed table, for models in bf16 or in all of `DTYPES`.

    Three kernels are always compiled in fp32, too: the training variant of the generator's head and the forward kernel
    of the discriminator tail, whose code differs, and `sum_strips`, whose result may be fp32 in a bf16 model.
    """
    of_bf16_model = [*_head_and_slot_cases(), *_norm_cases(), *_other_cases(), *_modern_cases()]
    if not all_dtypes:
        also_in_fp32 = [case for case in of_bf16_model if case.name in _ALSO_FP32]
        return of_bf16_model + [in_dtype(case, "fp32") for case in also_in_fp32]
    depend_on_dtype = [case for case in of_bf16_model if case.dtype == "bf16"]
    in_fp16 = [in_dtype(case, "fp16") for case in depend_on_dtype]
    in_fp32 = [in_dtype(case, "fp32") for case in depend_on_dtype]
    return of_bf16_model + in_fp16 + in_fp32


def in_dtype(case: KernelCase, dtype: str) -> KernelCase:
    """Return a copy of a bf16 case that compiles the same kernel for tensors of `dtype`.

    If the kernel has the constant PAIR, it is set for fp32 and fp16. With PAIR, the kernel keeps the sum of a value
    and its bias as two numbers, the rounded sum and its rounding error.
    """
    types = {argument: triton_type.replace("bf16", dtype) for argument, triton_type in case.types.items()}
    constants = case.constants
    if "PAIR" in constants:
        constants = constants | {"PAIR": dtype != "bf16"}
    return case._replace(types=types, constants=constants, dtype=dtype)


def _case(
    name: str,
    kernel: Any,
    constants: dict[str, Any],
    num_warps: int,
    other_types: dict[str, str] | None = None,
    dtype: str = "bf16",
) -> KernelCase:
    """Return a case; the type of an argument is that in `other_types` or, if it is not there, in `_TYPES`."""
    type_of = _TYPE_OF | (other_types or {})
    types = {argument: type_of[argument] for argument in kernel.arg_names if argument not in constants}
    return KernelCase(name, kernel, types, constants, [name for name in types if name in _DIVISIBLE], num_warps, dtype)


def _head_and_slot_cases() -> list[KernelCase]:
    """Return the kernels of the generator's head (in an evaluation: without gradient), its slots, and the tail."""
    head = {"PAIR": False, "WIDTH": 30592, "BLOCK": mlm_head.BLOCK, "DISALLOW_CORRECT": False, "APPROXIMATE": True}
    tile = {"BLOCK_T": 2, "BLOCK_H": 1024}
    replace = {"BLOCK_S": slots.REPLACE_BLOCK_S, "BLOCK_N": slots.REPLACE_BLOCK_N}
    fp32_weight = {"weight_ptr": "*fp32"}
    return [
        *(
            _case(name, mlm_head.row_kernel, head | {"WITH_GRADIENT": has_gradient}, mlm_head.NUM_WARPS, fp32_weight)
            for name, has_gradient in (("head_train", True), ("head_evaluate", False))
        ),
        _case(
            "tail_forward",
            discriminator_tail.tail_forward_kernel,
            tile | {"PAIR": False},
            discriminator_tail.NUM_WARPS,
            {"logits_ptr": "*fp32"},
        ),
        _case(
            "tail_backward",
            discriminator_tail.tail_backward_kernel,
            tile,
            discriminator_tail.NUM_WARPS,
            {"logits_ptr": "*fp32"},
        ),
        _case(
            "replace",
            slots.replace_kernel,
            replace,
            slots.NUM_WARPS,
            fp32_weight | {"label_ptr": "*i1"},
            dtype="int64",
        ),
        _case("gather_backward", slots.scatter_add_kernel, {"BLOCK_N": 256, "BLOCK_H": 256}, num_warps=1),
    ]


def _norm_cases() -> list[KernelCase]:
    """Return the kernels of `dropout_add_norm` for hidden sizes 256 and 1024; those named `_p0` have no dropout."""
    kernels: dict[str, tuple[Any, dict[str, Any]]] = {
        "norm_fwd": (layer_passes.norm_forward_kernel, {}),
        "norm_bwd": (layer_passes.norm_backward_kernel, {"SUM_X": True}),
    }
    return [
        _case(f"{name}_{hidden}{suffix}", kernel, constants | {"DROP": drop, "BLOCK_H": hidden}, num_warps)
        for name, (kernel, constants) in kernels.items()
        for hidden, num_warps in _WARPS.items()
        for suffix, drop in (("", True), ("_p0", False))
    ]


def _other_cases() -> list[KernelCase]:
    """Return the other kernels of ELECTRA; `join` joins the gradients of query, key and value."""
    mask = {"SHOWS": True, "BLOCK_S": slots.MASK_BLOCK_S, "BLOCK_T": slots.MASK_BLOCK_T}
    return [
        _case(
            "gelu_gradient",
            layer_passes.gelu_gradient_kernel,
            {"BLOCK": layer_passes.GELU_BLOCK},
            layer_passes.NUM_WARPS,
        ),
        _case(
            "keyed_dropout",
            keyed_dropout.keyed_dropout_kernel,
            {"BLOCK": keyed_dropout.BLOCK},
            keyed_dropout.NUM_WARPS,
        ),
        _case("mask", slots.mask_kernel, mask, slots.NUM_WARPS, {"weight_ptr": "*fp32"}),
        *(
            _case(
                f"join_{hidden}",
                qkv_gradient.join_gradients_kernel,
                {"BLOCK": hidden},
                num_warps,
                {"key_ptr": "*bf16"},
            )
            for hidden, num_warps in _WARPS.items()
        ),
        _case("sum_strips", strip_sums.sum_strips_kernel, dict(strip_sums.BLOCK), strip_sums.NUM_WARPS),
    ]


def _modern_cases() -> list[KernelCase]:
    """Return the kernels of the architecture `modern`, rotary positions for the widths of both towers."""
    geglu = {"BLOCK": modern_layer.GEGLU_BLOCK}
    return [
        *(
            _case(
                f"rotary_{hidden}",
                modern_layer.rotary_kernel,
                {"NUM_PAIRS": 32, "BLOCK_N": hidden // 32, "BLOCK_F": 32},
                num_warps,
            )
            for hidden, num_warps in _WARPS.items()
        ),
        _case("geglu_forward", modern_layer.geglu_forward_kernel, geglu, modern_layer.NUM_WARPS),
        _case("geglu_backward", modern_layer.geglu_backward_kernel, geglu, modern_layer.NUM_WARPS),
    ]


def compile_case(case: KernelCase, arch: int) -> Compiled:
    """Compile a kernel for compute capability `arch`, such as 90, and count resources and instructions.

    Triton caches machine code on disk, so a kernel that was compiled before is not compiled again.
    """
    compiled = triton.compile(
        _kernel_source(case),
        target=GPUTarget("cuda", arch, _WARP_SIZE),
        options={"num_warps": case.num_warps, "enable_fp_fusion": True},
    )
    usage, code = _disassemble(compiled.asm["cubin"])
    return Compiled(
        name=case.name,
        dtype=case.dtype,
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


def try_to_compile(case: KernelCase, arch: int) -> Compiled | Refused:
    """Compile a kernel for compute capability `arch`, and return the compiler's error if it refuses the kernel."""
    try:
        return compile_case(case, arch)
    except Exception as error:  # noqa: BLE001  Parts of the compiler raise different types; the row has the error.
        message = str(error).strip().splitlines() or [""]
        return Refused(case.name, case.dtype, arch, f"{type(error).__name__}: {message[-1]}")


def _kernel_source(case: KernelCase) -> ASTSource:
    """Build the compiler's input, with the types and alignments that a real launch takes from its arguments."""
    names = case.kernel.arg_names
    signature = dict.fromkeys(names, "constexpr") | case.types
    divisible_by_16 = [name for name in names if signature[name].startswith("*") or name in case.divisible]
    # Triton's key for an argument is a tuple that holds the argument's index.
    path_of_name = {name: (index,) for index, name in enumerate(names)}
    return ASTSource(
        case.kernel,
        signature,
        constexprs={path_of_name[name]: value for name, value in case.constants.items()},
        attrs={path_of_name[name]: [["tt.divisibility", 16]] for name in divisible_by_16},
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Return resource usage and machine code of a .cubin as text, by the `cuobjdump` in Triton's package."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def dump(flag: str, path: str) -> str:
        command = [str(tool), flag, path]
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = dump("-res-usage", file.name)
        code = dump("-sass", file.name)
    return usage, code


def _number(pattern: str, text: str) -> str:
    """Return what the first group of `pattern` matches in the disassembler's report, such as "96"."""
    match = re.search(pattern, text)
    assert match, f"cuobjdump's output has no match of {pattern!r}: adapt the pattern to this version of Triton"
    return match[1]


def table(rows: Sequence[Compiled | Refused]) -> str:
    """Return the report as text: Triton's version, a header, and one line for each kernel, in columns of fixed width.

    The test's snapshot (tests/kernels/compiled_kernels.txt) has this form.
    """
    header = (
        f"{'kernel':<16} dtype   arch {'regs':>5} {'stack':>6} {'shared':>7} {'ldg128':>7} {'stg128':>7} {'sass':>6}"
    )
    lines = [f"triton {triton.__version__}", header]
    for row in rows:
        subject = f"{row.name:<16} {row.dtype:<5} {f'sm_{row.arch}':>6}"
        if isinstance(row, Refused):
            lines.append(f"{subject} {row.error}")
            continue
        resources = f"{row.registers:>5} {row.stack_bytes:>6} {row.shared_bytes:>7}"
        instructions = f"{row.wide_loads:>7} {row.wide_stores:>7} {row.instructions:>6}"
        lines.append(f"{subject} {resources} {instructions}")
    return "\n".join(lines)


def main() -> None:
    """Compile all kernels for the architectures on the command line and print the table.

    With `--json FILE`, all counts are written to the file, too. The exit code is 1 if the compiler refuses a kernel.
    """
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument(
        "--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capabilities, e.g. 80 90 100"
    )
    parser.add_argument("--all-dtypes", action="store_true", help="compile every kernel in bf16, fp16 and fp32")
    parser.add_argument("--json", type=Path, help="also write the table's rows to this JSON file")
    arguments = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") != "1", "TRITON_INTERPRET is 1, so kernels are not compiled: unset it"
    rows = [try_to_compile(case, arch) for arch in arguments.arch for case in cases(arguments.all_dtypes)]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1), "utf-8")
    if any(isinstance(row, Refused) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
