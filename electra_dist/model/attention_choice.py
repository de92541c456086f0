"""Choose the attention backend of a run, try it on the device, and describe the choice for the log.

Guarantee: dropout is never dropped silently. A backend without dropout is not chosen where the config asks for some,
and FlashAttention is chosen only if its dropout was seen to act on this device. The same holds for the windows of
`model.architecture: modern`.

How: on a GPU `engine.attention: auto` takes the first of flash3 (if its package is installed), flash and flex that can
run and passes its trial, and sdpa otherwise. The trial runs a forward and a backward pass on a few packed rows and
compares them with plain operations in fp32, without dropout, for whole examples and for windows; torch's own attention
may take a library, such as cuDNN, that is broken where the backend is not. For flash it also checks the mean and the
scatter of the dropout factors. On a CPU the backend is sdpa.

Cost: a trial of flash runs a few small kernels; one of flex compiles it, which takes seconds.

Limits: the trial finds a kernel that is missing or wrong, not one that is slow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from electra_dist.collectives import Candidate, Choice, first_that_works
from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.model.attention import (
    BACKENDS,
    Flash3Mask,
    FlashMask,
    FlexMask,
    LayerMask,
    RowLayout,
    SdpaMask,
    attend_with_plain_operations,
    by_heads,
    head_widths,
)
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.flash_attention import ExampleBounds, flash3_is_installed

_TRIAL_ROWS = 2
_TRIAL_HEADS = 2
_TRIAL_TOKENS = 256  # of a row
_TRIAL_EXAMPLE_TOKENS = 100  # examples of 100, 100 and 56 tokens: borders lie inside the blocks of 128 tokens
_TRIAL_MOST_REACH = 40  # of a window; a wider one would not differ from whole examples
_TRIAL_TOLERANCE = 0.05  # largest difference allowed from the definition; bf16 numbers near 1 are 0.008 apart
# Least standard deviation of the sums of kept probabilities, divided by sqrt(p) for dropout of probability p. Dropout
# that works gives about eight times as much on the trial's rows.
_LEAST_SCATTER = 0.02


def choose_attention(config: Config, device: str) -> Choice:
    """Choose an attention backend, a key of BACKENDS, for this rank and give the reason.

    Each rank chooses for itself, so ranks may differ; `collectives.agree` then makes one choice of all of them. Raises
    UserError if the config demands a backend that cannot run.
    """
    wanted = config.engine.attention
    if wanted == "sdpa":
        return Choice("sdpa", "set by engine.attention")
    if wanted != "auto":
        return _demanded(BACKENDS[wanted], config, device)
    if config.objective.facts.has_cloze_generator:
        return Choice("sdpa", "objective electric reads in two directions, and its one-way masks exist for sdpa only")
    if device != "cuda":
        return Choice("sdpa", "FlashAttention and FlexAttention do not train on a CPU")

    preferred: list[type[LayerMask]] = [FlashMask, FlexMask]
    if flash3_is_installed():
        preferred.insert(0, Flash3Mask)
    candidates = [
        Candidate(backend.name, backend.title, functools.partial(find_fault, backend, config, device))
        for backend in preferred
    ]
    found = first_that_works(candidates, fallback="sdpa")
    if found.name == "sdpa":
        return found
    return Choice(found.name, "; ".join(filter(None, [found.reason, BACKENDS[found.name].advantage])))


def _demanded(backend: type[LayerMask], config: Config, device: str) -> Choice:
    """Choose the backend that the config demands; raise UserError if it cannot be used on this device."""
    if device != "cuda":
        raise UserError(
            f"engine.attention: {backend.name} needs a GPU, because {backend.title} has no backward pass on a CPU; "
            f"set engine.attention to auto or sdpa"
        )
    fault = find_fault(backend, config, device)
    if fault:
        raise UserError(
            f"engine.attention: {backend.name} cannot be used on this GPU: {fault}; set engine.attention to auto or "
            f"sdpa"
        )
    return Choice(backend.name, "set by engine.attention")


def attention_note(choice: Choice, config: Config, device: str) -> str:
    """Return the log line about attention: backend, reason, dropout, and whether gradients are deterministic."""
    disorder = BACKENDS[choice.name].disorder(config.engine.deterministic) if device == "cuda" else ""
    gradients = f"not deterministic, because {disorder}" if disorder else "deterministic"
    return (
        f"attention: {choice.name} ({choice.reason}), dropout {config.model.attention_dropout:g}, "
        f"gradients {gradients}"
    )


def find_fault(backend: type[LayerMask], config: Config, device: str) -> str:
    """Return why a backend cannot be used for this config on this device, by its limits and by trials, or ""."""
    limit = backend.limit(config)
    if limit:
        return limit
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision, torch.float32)
    reaches: list[int | None] = [None]
    if config.model.architecture == "modern":
        reaches.append(min(config.model.local_window // 2, _TRIAL_MOST_REACH))
    for head_width in head_widths(config.model):
        for reach in reaches:
            fault = find_trial_fault(backend, device, dtype, head_width, config.model.largest_attention_dropout, reach)
            if fault:
                windows = "" if reach is None else " in windows"
                return f"it failed its trial with heads of width {head_width}{windows}: {fault}"
    return ""


def find_trial_fault(
    backend: type[LayerMask], device: str, dtype: torch.dtype, head_width: int, dropout: float, reach: int | None
) -> str:
    """Try a backend on a few random rows; return what is wrong, or "" if the backend may be used.

    A fault is an exception, an output or a gradient that is NaN or differs by more than 0.05 from plain operations in
    fp32, or dropout that does not act as asked for.
    """
    shape = (4, _TRIAL_ROWS * _TRIAL_TOKENS, _TRIAL_HEADS * head_width)
    generator = torch.Generator(device).manual_seed(0)
    *inputs, upstream = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    expected = _expected_output_and_gradient(inputs, upstream, reach)
    try:
        backend.switch_on()
        found = _output_and_gradient(backend, inputs, upstream, reach)
        # One difference for the output, and one for the gradients. `max` of Python would lose a NaN.
        differences = [(a - b).abs().max().item() for a, b in zip(expected, found, strict=True)]
        for difference in differences:
            if not difference <= _TRIAL_TOLERANCE:
                return f"it differs by {difference:.2g} from its definition, more than {_TRIAL_TOLERANCE}"
        if dropout:
            return _find_dropout_fault(backend, inputs, dropout, reach)
    except Exception as error:  # noqa: BLE001  A compiler may raise anything, and sdpa can still run.
        return _first_line(error)
    return ""


def _expected_output_and_gradient(
    inputs_TH: Sequence[torch.Tensor], upstream_TH: torch.Tensor, reach: int | None
) -> list[torch.Tensor]:
    """Compute the results of `_output_and_gradient` by matrix products and a softmax in fp32, for comparison."""
    qkv = torch.cat(list(inputs_TH), 1).float().requires_grad_()
    bias_B1SS = SdpaMask.of_rows(_trial_layout(qkv.device), qkv.dtype, None, reach).bias_B1SS
    context_BNSD = attend_with_plain_operations(*by_heads(qkv, _TRIAL_HEADS, _TRIAL_ROWS), bias_B1SS)
    out_TH = context_BNSD.transpose(1, 2).reshape(len(qkv), -1)
    return [out_TH.detach(), *torch.autograd.grad(out_TH, qkv, upstream_TH.float())]


def _output_and_gradient(
    backend: type[LayerMask], inputs_TH: Sequence[torch.Tensor], upstream_TH: torch.Tensor, reach: int | None
) -> list[torch.Tensor]:
    """Run a backend without dropout; return its output, [T, H], and the gradient of query, key and value, [T, 3 H]."""
    qkv = torch.cat(list(inputs_TH), 1).requires_grad_()
    out_TH = _attend(backend, qkv, 0.0, reach)
    (gradient,) = torch.autograd.grad(out_TH, qkv, upstream_TH)
    return [out_TH.detach().float(), gradient.float()]


def _attend(backend: type[LayerMask], qkv: torch.Tensor, dropout: float, reach: int | None) -> torch.Tensor:
    layout = _trial_layout(qkv.device)
    mask = backend.of_rows(layout, qkv.dtype, _trial_bounds(qkv.device), reach)
    return mask.attend(qkv, _TRIAL_HEADS, dropout, DropoutKeys.off(layout.example_BS).of_layers(1)[0])


def _find_dropout_fault(
    backend: type[LayerMask], inputs_TH: Sequence[torch.Tensor], dropout: float, reach: int | None
) -> str:
    """Return what is wrong with a backend's dropout, or "" if it drops about the share `dropout`."""
    query, key, value = inputs_TH
    # With values of one, each output is (sum of the kept attention probabilities) / (1 - p), whose expected value is
    # 1. If the outputs do not differ from one another (`_LEAST_SCATTER`), nothing was dropped. If their mean over
    # 1,024 queries is not within 0.05 of 1, the kernel used another p; 0.05 is more than five standard deviations of
    # that mean at p = 0.1.
    out_TH = _attend(backend, torch.cat([query, key, torch.ones_like(value)], 1), dropout, reach)
    sums = out_TH.view(len(query), _TRIAL_HEADS, -1)[..., 0].float()
    mean = sums.mean().item()
    scatter = sums.std().item()
    if not (abs(mean - 1) <= _TRIAL_TOLERANCE and scatter > _LEAST_SCATTER * dropout**0.5):
        return f"its dropout of {dropout:g} is not in effect: kept probabilities sum to {mean:.3g} +- {scatter:.2g}"
    return ""


def _trial_layout(device: torch.device) -> RowLayout:
    """Return where the examples of the trial's rows lie; of the layout only `example_BS` is valid."""
    example_S = torch.arange(_TRIAL_TOKENS, device=device).div(_TRIAL_EXAMPLE_TOKENS, rounding_mode="floor")
    example_BS = example_S.expand(_TRIAL_ROWS, _TRIAL_TOKENS)
    return RowLayout(
        example_BS=example_BS, position_BS=example_BS, token_type_BS=example_BS, is_real_BS=example_BS >= 0
    )


def _trial_bounds(device: torch.device) -> ExampleBounds:
    """Return where the examples of the trial's rows begin; two empty ones follow them, as in real batches."""
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
