"""Fused operations on the GPU: their correctness and their time beside the alternatives. Parts of `gpu.py`.

Every head draws a sample. A rival without a sampler gets a separate one, which computes the logits again, as its users
have to. Each check returns rows with a boolean `right`.

Limits: a rival that is not installed is left out of the tables; the record's versions show which these are. Without a
GPU, the checks run on the references at toy sizes, and torch.compile is left out.

Shapes: M masked rows, D features, V padded vocabulary, B rows, S tokens, N slots (masked positions) per row; a product
[m, k] x [k, n] has 2 m n k FLOPs.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import rtd_loss
from electra_kernels.layer_passes import dropout_add_norm
from electra_kernels.mlm_head import mlm_head_loss_and_sample
from electra_kernels.slots import gather_masked, replace_and_label
from gpu_parts.recording import Case, Row, Rows, Setup, relative_error, time_and_peak

from electra_dist.objectives.masking import num_slots

Tensors = list[torch.Tensor]


class Sizes(NamedTuple):
    """Sizes of all inputs: `LARGE` for the large model on one GPU, `TOY` for the smoke run."""

    masked: tuple[int, ...]  # Numbers of masked rows with which the head is timed.
    embedding: int  # Features of an embedding, which are the head's input.
    vocab: int  # Entries of the vocabulary.
    padded: int  # Rows of the embedding table, `vocab` rounded up.
    batch: int  # Rows of a micro-batch.
    seq_len: int  # Tokens of a row.
    slots: int  # Masked positions of a row.
    widths: tuple[int, int]  # Hidden widths of generator and discriminator.
    exact_rows: int  # Masked rows of the head in the comparison with float64.


_LARGE_SLOTS = num_slots(0.25, 512)  # 130
LARGE = Sizes(
    masked=(64 * _LARGE_SLOTS, 128 * _LARGE_SLOTS),
    embedding=1024,
    vocab=30522,
    padded=30592,
    batch=64,
    seq_len=512,
    slots=_LARGE_SLOTS,
    widths=(256, 1024),
    exact_rows=512,
)
TOY = Sizes((24,), 16, 300, 384, 2, 16, 4, (8, 16), 12)


def sizes_of(setup: Setup) -> Sizes:
    return TOY if setup.smoke else LARGE


class Operation(NamedTuple):
    """One fused operation with the alternatives that a user has without it."""

    name: str
    ours: Callable[[Tensors, str], torch.Tensor]  # (inputs, backend) -> output
    rivals: dict[str, Callable[[Tensors], torch.Tensor]]  # name -> (inputs -> output); the first is eager torch
    inputs: Tensors  # Tensors that get a gradient; empty if the operation has no backward pass.
    num_bytes: int = 0  # Least memory traffic of forward and backward; 0 for the head, which computes.

    def backends(self, setup: Setup) -> tuple[str, ...]:
        """Return the backends of ours that are measured: all for the discriminator tail, else the first."""
        return setup.backends if self.name == "discriminator tail" else setup.backends[:1]


def head_operation(
    name: str, sizes: Sizes, num_rows: int, device: str, dtype: torch.dtype, chunk: int = 4096
) -> Operation:
    """Return the generator's head at M = `num_rows`: forward and sample; the output is the summed loss."""
    vocab = sizes.vocab
    x_MD = torch.randn(num_rows, sizes.embedding, device=device, dtype=dtype).requires_grad_()
    table_VD = torch.randn(sizes.padded, sizes.embedding, device=device, dtype=dtype) * sizes.embedding**-0.5
    bias_V = torch.randn(vocab, device=device, dtype=dtype).requires_grad_()
    target_M = torch.randint(vocab, (num_rows,), device=device)

    def ours(given: Tensors, backend: str) -> torch.Tensor:
        return our_head(given, target_M, vocab, backend, chunk)[0]

    def eager(given: Tensors) -> torch.Tensor:
        x_MD, table_VD, bias_V = given
        logits_MV = (F.linear(x_MD, table_VD[:vocab]) + bias_V).float()
        loss = F.cross_entropy(logits_MV, target_M, reduction="sum")
        _gumbel_max(logits_MV.detach())
        return loss

    def with_sample(loss: Callable[..., torch.Tensor]) -> Callable[[Tensors], torch.Tensor]:
        def rival(given: Tensors) -> torch.Tensor:
            x_MD, table_VD, bias_V = given
            with torch.no_grad():
                for x in x_MD.split(4096):
                    _gumbel_max(F.linear(x, table_VD[:vocab], bias_V).float())
            return loss(x_MD, table_VD[:vocab], bias_V)

        return rival

    rivals: dict[str, Callable[[Tensors], torch.Tensor]] = {"eager": eager}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        rivals["Liger + sampler"] = with_sample(lambda x_MD, table, bias: liger(table, x_MD, target_M, bias))
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        rivals["CCE + sampler"] = with_sample(
            lambda x_MD, table, bias: linear_cross_entropy(x_MD, table, target_M, bias=bias, reduction="sum")
        )
    return Operation(name, ours, rivals, [x_MD, table_VD.requires_grad_(), bias_V])


def our_head(
    given: Tensors, target_M: torch.Tensor, vocab: int, backend: str, chunk: int = 4096
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the summed loss and the samples, int64 [M], with our head, `chunk` rows at a time."""
    row_M = torch.arange(len(target_M), device=target_M.device)
    weight_M = torch.ones(len(target_M), device=target_M.device)
    out = mlm_head_loss_and_sample(
        *given, target_M, weight_M, seed=1, step=2, row_M=row_M, vocab_size=vocab, chunk=chunk, backend=backend
    )
    return out.loss_sum, out.sampled_M


def _gumbel_max(logits_MV: torch.Tensor) -> torch.Tensor:
    """Return a sample from the softmax of each row, int64 [M], by adding Gumbel noise and taking the largest."""
    noise_MV = -torch.log(-torch.log(torch.rand_like(logits_MV) + 1e-9) + 1e-9)  # As in Google's code.
    return (logits_MV + noise_MV).argmax(1)


def operations(sizes: Sizes, device: str, dtype: torch.dtype) -> list[Operation]:
    """Return all operations except the head, with random inputs of the model's sizes."""
    B, S, N = sizes.batch, sizes.seq_len, sizes.slots
    size = torch.finfo(dtype).bits // 8  # Bytes per element.
    narrow, wide = sizes.widths

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    positions = torch.rand(B, S, device=device).argsort(1)[:, :N]
    flat_positions = (positions + torch.arange(B, device=device)[:, None] * S).flatten()
    rows = torch.arange(B, device=device)
    label = torch.rand(B * S, device=device) > 0.85
    mask = torch.rand(B * S, device=device) > 0.02
    ids = torch.randint(sizes.vocab, (B, S), device=device)
    weight = (torch.rand(B, N, device=device) > 0.1).float()
    sampled = torch.randint(sizes.vocab, (B * N,), device=device)

    def eager_tail(given: Tensors) -> torch.Tensor:
        dense, bias, out_weight, out_bias = given
        logits = (F.gelu(dense + bias) @ out_weight + out_bias).float()
        loss = F.binary_cross_entropy_with_logits(logits, label.float(), reduction="none")
        return (loss * mask).sum()

    def eager_replace(_: Tensors) -> torch.Tensor:
        corrupted = ids.scatter(1, positions, torch.where(weight > 0, sampled.view(B, N), ids.gather(1, positions)))
        return (corrupted != ids).sum()

    found = [
        Operation(
            "masked gather",
            lambda given, backend: gather_masked(given[0], positions, backend=backend),
            {"eager": lambda given: given[0].flatten(0, 1)[flat_positions]},
            [normal(B, S, narrow)],
            size * narrow * (3 * B * N + B * S),
        ),
        Operation(
            "replace + label",
            lambda _, backend: replace_and_label(ids, positions, weight, sampled, backend=backend)[1].sum(),
            {"eager": eager_replace},
            [],
            B * (S * 17 + N * 20),
        ),
        Operation(
            "discriminator tail",
            lambda given, backend: rtd_loss(*given, label, mask, backend=backend).loss_sum,
            {"eager": eager_tail},
            [normal(B * S, wide), normal(wide), normal(wide), normal(1)],
            3 * size * B * S * wide,
        ),
    ]
    key = torch.tensor([1, 2, 1], device=device)  # seed, step, layer

    def our_norm(given: Tensors, backend: str) -> torch.Tensor:
        return dropout_add_norm(*given, rows, key, 1, 0.1, 1e-12, backend)[0]

    def eager_norm(given: Tensors) -> torch.Tensor:
        x, residual, scale, shift = given
        return F.layer_norm(F.dropout(x, 0.1) + residual, scale.shape, scale, shift, 1e-12)

    for width in sizes.widths:
        inputs = [normal(B, S, width), normal(B, S, width), normal(width), normal(width)]
        traffic = 8 * size * B * S * width
        found.append(Operation(f"dropout+add+norm {width}", our_norm, {"eager": eager_norm}, inputs, traffic))
    return found


def head_cases(setup: Setup) -> Iterator[Case]:
    sizes = sizes_of(setup)
    for num_rows in sizes.masked:
        head = head_operation(f"head M={num_rows}", sizes, num_rows, setup.device, setup.dtype)
        yield from _timing_cases(head, "head", setup)


def operation_cases(setup: Setup) -> Iterator[Case]:
    for subject in operations(sizes_of(setup), setup.device, setup.dtype):
        yield from _timing_cases(subject, "operation", setup)


def _timing_cases(subject: Operation, kind: str, setup: Setup) -> Iterator[Case]:
    """Yield forward and backward of an operation: ours, its rivals and, on a GPU, torch.compile of eager torch.

    A row of an operation that moves data has `tb_per_s`: its least memory traffic divided by its time, in TB/s.
    """
    functions: dict[str, Callable[[Tensors], torch.Tensor]] = {
        f"ours ({backend})": functools.partial(subject.ours, backend=backend) for backend in subject.backends(setup)
    }
    functions |= subject.rivals
    if setup.device == "cuda":
        # Shapes are static in training, so every operation gets a compilation of its own.
        functions["torch.compile"] = torch.compile(subject.rivals["eager"], dynamic=False)
    for name, function in functions.items():
        run = functools.partial(_time, subject, function)
        yield Case(subject.name, name, f"compiled {kind}" if name == "torch.compile" else kind, run)


def _time(subject: Operation, function: Callable[[Tensors], torch.Tensor]) -> Rows:
    upstream = torch.ones_like(subject.rivals["eager"](subject.inputs)) if subject.inputs else None

    def call() -> None:
        out = function(subject.inputs)
        if upstream is not None:
            torch.autograd.grad(out, subject.inputs, upstream.to(out.dtype))

    row = time_and_peak(call)
    if subject.num_bytes:
        row["tb_per_s"] = subject.num_bytes / row["ms"] / 1e9
    return [row]


def ceilings(setup: Setup) -> Iterator[Case]:
    """Yield a copy within the device and every product of the model, with which all other times can be compared."""
    from gpu_parts.steps import bench_of  # Here, because a failure of its imports shall cost this part only.

    model, sizes = bench_of(setup).config.model, sizes_of(setup)
    num_bytes = 4 * 2**30 if setup.device == "cuda" else 2**16
    yield Case("copy", f"{num_bytes / 2**30:.0f} GiB", "product", functools.partial(_copy, setup.device, num_bytes))
    num_tokens = sizes.batch * sizes.seq_len
    products = {}  # name -> (m, n, k)
    for name in ("discriminator", "generator"):
        tower = getattr(model, name)
        hidden, wide = tower.hidden_size, tower.intermediate_size
        products[f"{name} qkv"] = num_tokens, 3 * hidden, hidden
        products[f"{name} attention output"] = num_tokens, hidden, hidden
        products[f"{name} feed-forward in"] = num_tokens, wide, hidden
        products[f"{name} feed-forward out"] = num_tokens, hidden, wide
    products["generator head"] = sizes.batch * sizes.slots, sizes.padded, model.embedding_size
    products["square"] = (8192,) * 3 if num_tokens > 8192 else (32,) * 3
    for name, (m, n, k) in products.items():
        for direction in ("forward", "input gradient", "weight gradient"):
            run = functools.partial(_multiply, direction, (m, n, k), setup)
            yield Case(f"{name} {m}x{n}x{k}", direction, "product", run)


def _copy(device: str, num_bytes: int) -> Rows:
    """Time a copy; `tb_per_s` counts the bytes read and the bytes written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    row = time_and_peak(lambda: target.copy_(source))
    return [row | {"tb_per_s": 2 * num_bytes / row["ms"] / 1e9}]


def _multiply(direction: str, mnk: tuple[int, int, int], setup: Setup) -> Rows:
    """Time one product of a linear layer with random numbers (a product of zeros is faster than any other)."""
    m, n, k = mnk
    x_mk, weight_nk, upstream_mn = (
        torch.randn(shape, device=setup.device, dtype=setup.dtype) for shape in ((m, k), (n, k), (m, n))
    )
    calls = {
        "forward": lambda: x_mk @ weight_nk.t(),
        "input gradient": lambda: upstream_mn @ weight_nk,
        "weight gradient": lambda: upstream_mn.t() @ x_mk,
    }
    row = time_and_peak(calls[direction])
    return [row | {"tflop_per_s": 2 * m * n * k / row["ms"] / 1e9}]


def value_cases(setup: Setup) -> Iterator[Case]:
    """Yield the comparison of every operation with the reference in float64, in fp32 and bf16, on 4 rows at most."""
    sizes, device = sizes_of(setup), setup.device
    small = sizes._replace(batch=min(sizes.batch, 4))
    for dtype in (torch.float32, torch.bfloat16):
        # Several chunks are used, so that the head's sums over chunks are checked, too.
        head = head_operation("head", small, sizes.exact_rows, device, dtype, chunk=sizes.exact_rows // 4)
        for subject in [head, *operations(small, device, dtype)]:
            for backend in subject.backends(setup) if subject.inputs else ():
                run = functools.partial(_compare_values, subject, backend, dtype)
                yield Case(f"{subject.name} {dtype}", f"ours ({backend})", "check", run)


def _compare_values(subject: Operation, backend: str, dtype: torch.dtype) -> Rows:
    """Compare outputs and gradients of one operation with the reference in float64.

    A backend is right if no output or gradient has a larger error than the reference has in the same type, plus one
    unit of rounding, because the two may round a tie differently.
    """
    exact = _outputs(
        subject, [tensor.detach().double().requires_grad_() for tensor in subject.inputs], "reference", dtype
    )
    reference_errors, errors = (
        [relative_error(value, e) for value, e in zip(_outputs(subject, subject.inputs, by, dtype), exact)]
        for by in ("reference", backend)
    )
    rounding = torch.finfo(dtype).eps
    right = all(error <= limit + rounding for error, limit in zip(errors, reference_errors))
    row: Row = {"operation": subject.name, "dtype": str(dtype).removeprefix("torch.")}
    return [row | {"error": max(errors), "reference_error": max(reference_errors), "right": right}]


def _outputs(subject: Operation, inputs: Tensors, backend: str, dtype: torch.dtype) -> Tensors:
    """Return the output of an operation, followed by the gradients of its inputs.

    The upstream gradient is the same random tensor in every call; its values are representable in `dtype`, so that a
    run in float64 gets exactly the same.
    """
    out = subject.ours(inputs, backend)
    generator = torch.Generator(out.device).manual_seed(0)
    upstream = torch.randn(out.shape, generator=generator, device=out.device) if out.dim() else torch.ones_like(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(dtype).to(out.dtype))]


def integer_cases(setup: Setup) -> Iterator[Case]:
    yield Case("integers", f"ours ({setup.backends[0]})", "check", functools.partial(_integers, setup))


def _integers(setup: Setup) -> Rows:
    """Compare replaced ids, labels and samples with the reference's.

    Ids and labels must be equal. Of the samples, 99.9 % must be equal, because two candidates may be closer than
    rounding errors.
    """
    sizes, device, backend = sizes_of(setup), setup.device, setup.backends[0]
    B, S, N = sizes.batch, sizes.seq_len, sizes.slots
    ids = torch.randint(sizes.vocab, (B, S), device=device)
    sampled = torch.randint(sizes.vocab, (B * N,), device=device)
    positions = torch.randint(S, (B, N), device=device)  # Some slots share a position.
    weight = (torch.rand(B, N, device=device) > 0.1).float()
    replaced, expected = (
        replace_and_label(ids, positions, weight, sampled, backend=by) for by in (backend, "reference")
    )
    are_equal = all(torch.equal(tensor, expected_tensor) for tensor, expected_tensor in zip(replaced, expected))
    states_MD = torch.randn(sizes.exact_rows * 16, 4, device=device)
    given = [states_MD, torch.randn(1000, 4, device=device), torch.zeros(1000, device=device)]
    target_M = torch.zeros(len(states_MD), dtype=torch.int64, device=device)
    drawn, expected_drawn = (our_head(given, target_M, 1000, by)[1] for by in (backend, "reference"))
    share = (drawn == expected_drawn).double().mean().item()
    return [
        {"operation": "replace + label", "share_equal": float(are_equal), "right": are_equal},
        {"operation": "sample", "share_equal": share, "right": share >= 0.999},
    ]
