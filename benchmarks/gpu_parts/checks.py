"""Correctness checks of our operations: four parts of `gpu.py`.

They compare values with float64 and integers with the references, test the distribution of the samples, and verify
that the head never makes the host wait for the device. Each check returns rows for the table with a boolean `right`;
the script fails at its end if one of them is false.

Limits: without a GPU, the checks run on the references at toy sizes, and the check of host waits is left out.

Shapes: M masked rows, B rows, S tokens, N slots (masked positions) per row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from electra_kernels.mlm_head import mlm_head_loss_and_sample
from electra_kernels.replace_tokens import replace_and_label
from gpu_parts.cases import Head, Sizes, cases, head_inputs, our_head
from gpu_parts.recording import Case, Rows

Run = Callable[[list[torch.Tensor], str], torch.Tensor]


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root-mean-square error of `value` divided by the root-mean-square of `exact`, which is float64."""
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def value_cases(sizes: Sizes, device: str, backends: list[str]) -> Iterator[Case]:
    """Yield the comparison of every operation with the reference in float64, in fp32 and in bf16.

    The batch is reduced to 4 rows at most.

    Args:
        sizes: Sizes of the inputs.
        device: Device of the inputs.
        backends: Backends of ours; only the discriminator tail is checked with all, the others with the first.
    """
    small = sizes._replace(batch=min(sizes.batch, 4))
    for dtype in (torch.float32, torch.bfloat16):
        head = head_inputs(small, sizes.exact_rows, device, dtype)

        def run_head(given: list[torch.Tensor], backend: str, head: Head = head) -> torch.Tensor:
            # Several chunks are used, so that the sums over chunks are checked, too.
            return our_head(Head(*given, *head[3:]), sizes.vocab, backend, chunk=sizes.exact_rows // 4)[0]

        subjects: list[tuple[str, Run, list[torch.Tensor]]] = [("head", run_head, head.differentiable())]
        subjects += [(case.name, case.ours, case.inputs) for case in cases(small, device, dtype) if case.inputs]
        for name, run, inputs in subjects:
            for backend in backends if name == "discriminator tail" else backends[:1]:
                check = functools.partial(_compare_values, name, run, inputs, backend, dtype)
                yield Case(f"{name} {dtype}", f"ours ({backend})", "check", check)


def _compare_values(name: str, run: Run, inputs: list[torch.Tensor], backend: str, dtype: torch.dtype) -> Rows:
    """Compare outputs and gradients of one operation with the reference in float64.

    A backend is right if no output or gradient has a larger error than the reference has in the same type, plus one
    unit of rounding.

    Returns:
        A row with the largest relative error of the backend and of the reference.
    """
    exact = _outputs(run, [tensor.detach().double().requires_grad_() for tensor in inputs], "reference", dtype)
    reference_values = _outputs(run, inputs, "reference", dtype)
    reference_errors = [relative_error(value, e) for value, e in zip(reference_values, exact)]
    backend_values = _outputs(run, inputs, backend, dtype)
    errors = [relative_error(value, e) for value, e in zip(backend_values, exact)]
    # One rounding of the result is allowed, because the two may round a tie differently.
    rounding = torch.finfo(dtype).eps
    right = all(error <= limit + rounding for error, limit in zip(errors, reference_errors))
    row = {"operation": name, "by": f"ours ({backend})", "dtype": str(dtype).removeprefix("torch.")}
    return [row | {"error": max(errors), "reference_error": max(reference_errors), "right": right}]


def _outputs(run: Run, tensors: list[torch.Tensor], backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the output of an operation, followed by the gradients of its inputs.

    The upstream gradient is the same random tensor in every call; its values are representable in `dtype`, so that a
    run in float64 gets exactly the same.

    Args:
        run: The operation.
        tensors: Its inputs, all of which get a gradient.
        backend: Implementation to run.
        dtype: Type to which the upstream gradient is rounded.
    """
    out = run(tensors, backend)
    generator = torch.Generator(out.device).manual_seed(0)
    upstream = torch.randn(out.shape, generator=generator, device=out.device) if out.dim() else torch.ones_like(out)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream.to(dtype).to(out.dtype))]


def integers(sizes: Sizes, device: str, backend: str) -> Rows:
    """Compare a backend's integers with the reference's: replaced ids, labels and samples.

    Ids and labels must be equal. Of the samples, 99.9 % must be equal, because two candidates may be closer than
    rounding errors.
    """
    B, S, N = sizes.batch, sizes.seq_len, sizes.slots
    ids = torch.randint(sizes.vocab, (B, S), device=device)
    sampled = torch.randint(sizes.vocab, (B * N,), device=device)
    positions = torch.randint(S, (B, N), device=device)  # Some slots share a position.
    weight = (torch.rand(B, N, device=device) > 0.1).float()
    replaced, expected = (
        replace_and_label(ids, positions, weight, sampled, backend=b) for b in (backend, "reference")
    )
    are_equal = all(torch.equal(tensor, expected_tensor) for tensor, expected_tensor in zip(replaced, expected))
    num_samples = sizes.exact_rows * 16
    states_MD = torch.randn(num_samples, 4, device=device)
    table_VD = torch.randn(1000, 4, device=device)
    drawn, expected_drawn = (_sample(states_MD, table_VD, b) for b in (backend, "reference"))
    share_equal = (drawn == expected_drawn).double().mean().item()
    return [
        {
            "operation": "replace + label",
            "by": f"ours ({backend})",
            "share_equal": float(are_equal),
            "right": are_equal,
        },
        {"operation": "sample", "by": f"ours ({backend})", "share_equal": share_equal, "right": share_equal >= 0.999},
    ]


def chi_square(device: str, backend: str, draws: int, vocab: int) -> Rows:
    """Test with chi-squared whether the samples follow the softmax, for flat, peaked and Zipf-distributed logits.

    A result is right if p > 1e-3. Tokens that are expected fewer than 10 times are counted together.

    Args:
        device: Device of the logits.
        backend: Implementation of the sampler.
        draws: Samples per distribution.
        vocab: Entries of the Zipf distribution, which resembles real text.

    Returns:
        Rows with the p-value of each distribution.
    """
    zipf = -1.1 * torch.arange(1, vocab + 1).float().log()
    found = []
    for name, logits in (("flat", torch.zeros(64)), ("peaked", torch.linspace(0, 8, 64)), ("realistic", zipf)):
        ones_MD = torch.ones(draws, 1, device=device)  # their product with the logits as a table gives equal rows
        drawn = _sample(ones_MD, logits.to(device)[:, None], backend)
        observed = drawn.bincount(minlength=len(logits)).double().cpu()
        expected = logits.double().softmax(0) * draws
        is_rare = expected < 10
        if is_rare.any():
            observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]])
            expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
        p = chi_square_p(observed, expected)
        row = {"operation": "chi squared", "by": f"ours ({backend})", "logits": name, "draws": draws}
        found.append(row | {"p": p, "right": p > 1e-3})
    return found


def _sample(states_MD: torch.Tensor, table_VD: torch.Tensor, backend: str) -> torch.Tensor:
    """Return the tokens that the generator's head draws for states and a token table, int64 [M]."""
    num_rows, vocab = len(states_MD), len(table_VD)
    row_M = torch.arange(num_rows, device=states_MD.device)
    bias_V, weight_M = torch.zeros(vocab, device=states_MD.device), torch.ones(num_rows, device=states_MD.device)
    output = mlm_head_loss_and_sample(
        states_MD,
        table_VD,
        bias_V,
        torch.zeros_like(row_M),
        weight_M,
        seed=3,
        step=4,
        row_M=row_M,
        vocab_size=vocab,
        backend=backend,
    )
    return output.sampled_M


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the p-value of Pearson's chi-squared test: how likely counts at least as far from `expected` are.

    Args:
        observed: Counts of each outcome, float64.
        expected: Expected counts with the same sum, float64.
    """
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees_of_freedom = torch.tensor(float(len(observed) - 1), dtype=torch.float64)
    # The chi-squared distribution is a gamma distribution, whose upper tail is the regularised incomplete gamma
    # function (Abramowitz and Stegun, 26.4.19).
    return torch.special.gammaincc(degrees_of_freedom / 2, statistic / 2).item()


def without_host(sizes: Sizes) -> Rows:
    """Check that the head runs without a host synchronisation and gives equal results from a CUDA graph.

    Forward, sample and backward run once while torch turns every synchronisation into an error. They are then captured
    and replayed; 99.9 % of the samples must be equal, and the gradients must agree to 1 % (relative).

    Limits: needs a CUDA device with Triton.
    """
    given = head_inputs(sizes, sizes.masked[0], "cuda", torch.bfloat16)

    def run() -> tuple[torch.Tensor, ...]:
        loss, sampled = our_head(given, sizes.vocab, "triton")
        return sampled, *torch.autograd.grad(loss, given.differentiable())

    expected = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        waits = ""
    except RuntimeError as error:
        waits = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # cuBLAS workspaces and compiled kernels, which a first call sets up, must exist before the capture. The calls run
    # on a separate stream, because the default stream cannot be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    # cuBLAS may choose another kernel in a graph; its rounding then decides near-ties between candidates differently.
    share = (captured[0] == expected[0]).double().mean().item()
    gradients = max(relative_error(value, exact.double()) for value, exact in zip(captured[1:], expected[1:]))
    rows: Rows = [
        {"what": "the host waits for nothing", "found": waits or "no wait", "right": not waits},
        {"what": "share of equal tokens from a CUDA graph", "found": share, "right": share > 0.999},
        {"what": "gradients from a CUDA graph, relative difference", "found": gradients, "right": gradients < 0.01},
    ]
    return [{"operation": "head", "by": "ours (triton)", **row} for row in rows]


def integer_cases(sizes: Sizes, device: str, backend: str) -> Iterator[Case]:
    """Yield the comparison of a backend's integers with the reference's."""
    yield Case("integers", f"ours ({backend})", "check", lambda: integers(sizes, device, backend))


def chi_square_cases(sizes: Sizes, device: str, backend: str) -> Iterator[Case]:
    """Yield the tests of the samples' distribution, with a million draws on a GPU and 20,000 on a CPU."""
    draws = 1_000_000 if device == "cuda" else 20_000
    yield Case("chi squared", f"ours ({backend})", "check", lambda: chi_square(device, backend, draws, sizes.vocab))


def without_host_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Yield the check of host waits, which needs a GPU."""
    if device == "cuda":
        yield Case("head", "ours (triton)", "check", lambda: without_host(sizes))
