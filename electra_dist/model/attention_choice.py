"""Choose the attention backend of a run, try it on the device, and describe the choice for the log.

Guarantee: dropout is never dropped silently. A backend without dropout is not chosen where the config asks for some,
and FlashAttention is chosen only if its dropout was seen to act on this device.

How: on a GPU `engine.attention: auto` takes the first of these that can run and passes its trial: flash where
`model.attention_dropout` is above 0; flex, then flash, where it is 0; sdpa otherwise. The trial runs a forward and a
backward pass on a few packed rows and compares them with sdpa's, without dropout. For flash it also checks the mean
and the scatter of the dropout factors. On a CPU the backend is sdpa.

Cost: a trial of flash runs a few small kernels; one of flex compiles it, which takes seconds.

Limits: the trial finds a kernel that is missing or wrong, not one that is slow.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.model.attention import AttentionChoice, attend, same_example
from electra_dist.model.flash_attention import flash_attention
from electra_dist.model.row_layout import ExampleBounds, RowLayout

_NAMES = {"flash": "FlashAttention", "flex": "FlexAttention"}
_REASONS = {
    "flash": "its kernels have dropout and compute no pairs of tokens from different examples",
    "flex": "skips blocks of tokens from different examples",
}

_FLASH_CAPABILITY = (8, 0)  # lowest compute capability of torch's FlashAttention kernels
_FLASH_WIDTH_MULTIPLE = 8  # the width of a head must be a multiple of it
_FLASH_MOST_WIDTH = 256  # widest head of the kernels

_TRIAL_ROWS = 2
_TRIAL_HEADS = 2
_TRIAL_TOKENS = 256  # of a row
_TRIAL_EXAMPLE_TOKENS = 100  # examples of 100, 100 and 56 tokens: borders lie inside the blocks of 128 tokens
_TRIAL_TOLERANCE = 0.05  # largest difference allowed from sdpa; bf16 numbers near 1 are 0.008 apart
# Least standard deviation of the sums of kept probabilities, divided by sqrt(p) for dropout of probability p. Dropout
# that works gives about eight times as much on the trial's rows.
_LEAST_SCATTER = 0.02


def choose_attention(config: Config, device: str) -> AttentionChoice:
    """Choose "sdpa", "flash" or "flex" for this rank. UserError: the config demands a backend that cannot run.

    Each rank chooses for itself, so ranks may differ; `agree_on_attention` then makes one choice of all of them.
    """
    wanted = config.engine.attention
    if wanted == "sdpa":
        return AttentionChoice("sdpa", "set by engine.attention")
    if wanted != "auto":
        return _demanded(wanted, config, device)
    if config.objective.facts.has_cloze_generator:
        return AttentionChoice(
            "sdpa", "objective electric reads in two directions, and its one-way masks exist for sdpa only"
        )
    if device != "cuda":
        return AttentionChoice("sdpa", "FlashAttention and FlexAttention do not train on a CPU")

    candidates = ("flash",) if config.model.attention_dropout else ("flex", "flash")
    if config.model.architecture == "modern":
        if config.model.attention_dropout:
            return AttentionChoice("sdpa", "model.architecture: modern has windows, and flex has no dropout")
        candidates = ("flex",)  # This project calls FlashAttention without windows.
    faults: list[str] = []
    for backend in candidates:
        fault = find_fault(backend, config, device)
        if not fault:
            return AttentionChoice(backend, "; ".join([*faults, _REASONS[backend]]))
        faults.append(f"{_NAMES[backend]} is not used: {fault}")
    return AttentionChoice("sdpa", "; ".join(faults))


def _demanded(backend: str, config: Config, device: str) -> AttentionChoice:
    if device != "cuda":
        raise UserError(
            f"engine.attention: {backend} needs a GPU, because {_NAMES[backend]} has no backward pass on a CPU; set "
            f"engine.attention to auto or sdpa"
        )
    fault = find_fault(backend, config, device)
    if fault:
        raise UserError(
            f"engine.attention: {backend} cannot be used on this GPU: {fault}; set engine.attention to auto or sdpa"
        )
    return AttentionChoice(backend, "set by engine.attention")


def agree_on_attention(choices: Sequence[AttentionChoice]) -> AttentionChoice:
    """Return the backend for all ranks: the one that every rank has chosen (`choices`, by rank), otherwise sdpa."""
    for choice in choices:
        if choice.backend == "sdpa":
            return choice
    for rank, choice in enumerate(choices):
        if choice.backend != choices[0].backend:
            return AttentionChoice(
                "sdpa",
                f"rank 0 would use {choices[0].backend} ({choices[0].reason}), but rank {rank} {choice.backend} "
                f"({choice.reason})",
            )
    return choices[0]


def attention_note(choice: AttentionChoice, config: Config, device: str) -> str:
    """Return the log line about attention: backend, reason, dropout, and whether gradients are deterministic."""
    gradients = "deterministic"
    if device == "cuda" and choice.backend == "sdpa":
        gradients = "not deterministic, because torch's kernel may add in any order"
    elif device == "cuda" and choice.backend == "flash" and not config.engine.deterministic:
        gradients = "not deterministic, because engine.deterministic is false"
    return (
        f"attention: {choice.backend} ({choice.reason}), dropout {config.model.attention_dropout:g}, "
        f"gradients {gradients}"
    )


def find_fault(backend: str, config: Config, device: str) -> str:
    """Return why "flash" or "flex" cannot be used for a run on this device, or "" if it can."""
    towers = (config.model.discriminator, config.model.generator)
    head_widths = sorted({tower.hidden_size // tower.num_heads for tower in towers})
    dropout = config.model.attention_dropout
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision, torch.float32)
    limit = _flash_limit(dtype, head_widths) if backend == "flash" else _flex_limit(dropout)
    if limit:
        return limit
    for head_width in head_widths:
        fault = find_trial_fault(backend, device, dtype, head_width, dropout)
        if fault:
            return f"it failed its trial with heads of width {head_width}: {fault}"
    return ""


def _flash_limit(dtype: torch.dtype, head_widths: Sequence[int]) -> str:
    """Return which limit of torch's FlashAttention the model or the current GPU exceeds, or "" if none."""
    if dtype == torch.float32:
        return "it computes in bf16 or fp16, and train.precision is fp32"
    for width in head_widths:
        if width % _FLASH_WIDTH_MULTIPLE or width > _FLASH_MOST_WIDTH:
            return f"a head of width {width} is not a multiple of {_FLASH_WIDTH_MULTIPLE} up to {_FLASH_MOST_WIDTH}"
    capability = torch.cuda.get_device_capability()
    if capability < _FLASH_CAPABILITY:
        major, minor = capability
        return f"the GPU has compute capability {major}.{minor}, and the kernels need 8.0"
    return ""


def _flex_limit(dropout: float) -> str:
    if dropout:
        return f"it has no dropout, and model.attention_dropout is {dropout:g}"
    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton, which is not installed"
    return ""


def find_trial_fault(backend: str, device: str, dtype: torch.dtype, head_width: int, dropout: float) -> str:
    """Try "flash" or "flex" on a few random rows; return what is wrong, or "" if the backend may be used.

    A fault is an exception, an output or a gradient that is NaN or differs from sdpa's by more than 0.05, or dropout
    of "flash" that does not act as asked for.
    """
    shape = (4, _TRIAL_ROWS, _TRIAL_HEADS, _TRIAL_TOKENS, head_width)
    generator = torch.Generator(device).manual_seed(0)
    *inputs, upstream = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    try:
        expected = _output_and_gradients("sdpa", inputs, upstream)
        found = _output_and_gradients(backend, inputs, upstream)
        # One difference for the output, and one for each gradient. `max` of Python would lose a NaN.
        differences = [(a - b).abs().max().item() for a, b in zip(expected, found, strict=True)]
        for difference in differences:
            if not difference <= _TRIAL_TOLERANCE:
                return f"it differs by {difference:.2g} from sdpa, more than {_TRIAL_TOLERANCE}"
        if backend == "flash" and dropout:
            return _find_dropout_fault(inputs, dropout)
    except Exception as error:  # noqa: BLE001  A compiler may raise anything, and sdpa can still run.
        return _first_line(error)
    return ""


def _output_and_gradients(
    backend: str, inputs_BNSD: Sequence[torch.Tensor], upstream_BNSD: torch.Tensor
) -> list[torch.Tensor]:
    """Return a backend's output and the gradients of query, key and value, each [B, N, S, D], without dropout."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs_BNSD]
    query, key, value = leaves
    if backend == "flash":
        out = _flash_on_rows(leaves, dropout=0.0)
    else:
        mask = same_example(_trial_layout(query.device), query.dtype, backend)
        out = attend(query, key, value, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream_BNSD)]


def _flash_on_rows(inputs_BNSD: Sequence[torch.Tensor], dropout: float) -> torch.Tensor:
    num_rows, num_heads, num_tokens, head_width = inputs_BNSD[0].shape
    qkv_BS3ND = torch.stack([tensor.transpose(1, 2) for tensor in inputs_BNSD], 2)
    out_TND = flash_attention(qkv_BS3ND.flatten(0, 1), _trial_bounds(inputs_BNSD[0].device), dropout)
    return out_TND.view(num_rows, num_tokens, num_heads, head_width).transpose(1, 2)


def _find_dropout_fault(inputs_BNSD: Sequence[torch.Tensor], dropout: float) -> str:
    """Return what is wrong with FlashAttention's dropout, or "" if it drops about the share `dropout`."""
    query, key, value = inputs_BNSD
    # With values of one, each output is (sum of the kept attention probabilities) / (1 - p), whose expected value is
    # 1. If the outputs do not differ from one another (`_LEAST_SCATTER`), nothing was dropped. If their mean over
    # 1,024 queries is not within 0.05 of 1, the kernel used another p; 0.05 is more than five standard deviations of
    # that mean at p = 0.1.
    sums = _flash_on_rows([query, key, torch.ones_like(value)], dropout)[..., 0].float()
    mean = sums.mean().item()
    scatter = sums.std().item()
    if not (abs(mean - 1) <= _TRIAL_TOLERANCE and scatter > _LEAST_SCATTER * dropout**0.5):
        return f"its dropout of {dropout:g} is not in effect: kept probabilities sum to {mean:.3g} +- {scatter:.2g}"
    return ""


def _trial_layout(device: torch.device) -> RowLayout:
    """Return the layout of the trial's rows; only `example_BS` is valid, the other fields are placeholders."""
    example_S = torch.arange(_TRIAL_TOKENS, device=device).div(_TRIAL_EXAMPLE_TOKENS, rounding_mode="floor")
    example_BS = example_S.expand(_TRIAL_ROWS, _TRIAL_TOKENS)
    return RowLayout(
        example_BS=example_BS, position_BS=example_BS, token_type_BS=example_BS, is_real_BS=example_BS >= 0
    )


def _trial_bounds(device: torch.device) -> ExampleBounds:
    """Return where the examples of the trial begin; two empty sequences follow them, as real batches may have."""
    first_tokens = [
        row * _TRIAL_TOKENS + first
        for row in range(_TRIAL_ROWS)
        for first in range(0, _TRIAL_TOKENS, _TRIAL_EXAMPLE_TOKENS)
    ]
    end = _TRIAL_ROWS * _TRIAL_TOKENS
    cu_seqlens = torch.tensor([*first_tokens, end, end, end], dtype=torch.int32, device=device)
    return ExampleBounds(cu_seqlens, longest=_TRIAL_TOKENS)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, cut to 120 characters, since compiler output may be long."""
    lines = str(error).splitlines()
    first = lines[0] if lines else type(error).__name__
    return first[:120]
