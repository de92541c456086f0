"""What a step of a large model launches on a GPU is what is compiled ahead of time: constants, dtypes, alignment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from electra_kernels.triton.compile_without_gpu import KernelCase, cases
from support import rehearsal
from support.torch_versions import needs_products_on_meta

from electra_dist.config.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
# Files of configs, with the kernels whose launches are compared (none: all) and the least number of them.
MODELS: dict[str, tuple[tuple[str, ...], int]] = {
    "large_25pct_mask.yaml": ((), 9),
    "modern_400m.yaml": (("rotary_kernel", "geglu_forward_kernel", "geglu_backward_kernel"), 4),
}
FEW_LAYERS = ["model.discriminator.num_layers=1", "model.generator.num_layers=1"]
TRITON_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
DIVISOR = 16  # Triton compiles another variant of a kernel for integers that are multiples of it


class Arguments(NamedTuple):
    """Arguments of a launch, as far as they decide what is compiled."""

    kernel: str
    constants: dict[str, Any]
    num_warps: int
    types: dict[str, str]  # of tensors
    divisible: frozenset[str]  # integers


@pytest.fixture(scope="module", params=MODELS)
def launches(request: pytest.FixtureRequest) -> list[Arguments]:
    """The launches of a micro-batch of 8 rows that are compared, each kind once."""
    recorded: list[Arguments] = []
    check = rehearsal._checked_launch

    def record(kernel: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> rehearsal.Launch:
        given = {**dict(zip(kernel.arg_names, args)), **options}
        constants = {name: value for name, value in given.items() if name.isupper()}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        integers = {name: value for name, value in given.items() if type(value) is int and name not in constants}
        launch = Arguments(
            kernel=kernel.__name__,
            constants=constants,
            num_warps=given["num_warps"],
            types={name: TRITON_TYPES[tensor.dtype] for name, tensor in tensors.items()},
            divisible=frozenset(name for name, value in integers.items() if value % DIVISOR == 0),
        )
        if launch not in recorded:
            recorded.append(launch)
        return check(kernel, args, grid, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "_checked_launch", record)
        config = load_config(CONFIGS / request.param, FEW_LAYERS)
        module = rehearsal.build(config)
        rehearsal.rehearse(module, lambda: rehearsal.step_input(config, module, 8))
    kernels, least = MODELS[request.param]
    compared = [launch for launch in recorded if not kernels or launch.kernel in kernels]
    assert len(compared) >= least
    return compared


def fits(case: KernelCase, launch: Arguments) -> bool:
    """Whether a case compiles what a launch would compile, or the same with fewer assumptions on alignment."""
    return (
        case.kernel.__name__ == launch.kernel
        and case.constants == launch.constants
        and case.num_warps == launch.num_warps
        and all(case.types[name] == triton_type for name, triton_type in launch.types.items())
        and {name for name in case.divisible if name in case.kernel.arg_names} <= launch.divisible
    )


@needs_products_on_meta
def test_every_launch_of_a_large_model_is_compiled_ahead_of_time(launches: list[Arguments]) -> None:
    for launch in launches:
        assert any(fits(case, launch) for case in cases()), launch
