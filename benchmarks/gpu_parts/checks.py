"""What `gpu.py` checks before it times anything: values against float64, samples, and that nothing waits for the host.

Each check gives rows with `right`; a wrong one fails the script after everything has run. Without a GPU the same
checks run on the references at toy sizes, but for the host's waits and the graph.

Shapes: M masked rows, B rows, S tokens, N slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from electra_kernels.replace import replace_and_label
from electra_kernels.sampling import sample
from gpu_parts.cases import Head, Sizes, cases, head_inputs, our_head
from scipy.stats import chisquare

Run = Callable[[list[torch.Tensor], str], torch.Tensor]


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Root-mean-square error over root-mean-square value."""
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def values(sizes: Sizes, device: str, backends: list[str]) -> list[dict[str, Any]]:
    """Each backend and the reference against the reference in float64: output and every gradient, fp32 and bf16."""
    small = sizes._replace(batch=min(sizes.batch, 4))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        head = head_inputs(small, sizes.exact_rows, device, dtype)

        def run_head(given: list[torch.Tensor], backend: str, head: Head = head) -> torch.Tensor:
            # Several chunks, so that sums over chunks are seen too.
            return our_head(Head(*given, *head[3:]), sizes.vocab, backend, chunk=sizes.exact_rows // 4)[0]

        subjects: list[tuple[str, Run, list[torch.Tensor]]] = [("head", run_head, head.differentiable())]
        subjects += [(case.name, case.ours, case.inputs) for case in cases(small, device, dtype) if case.inputs]
        for name, run, inputs in subjects:
            exact = _outputs(run, [t.detach().double().requires_grad_() for t in inputs], "reference", dtype)
            reference = [relative_error(v, e) for v, e in zip(_outputs(run, inputs, "reference", dtype), exact)]
            for backend in backends if name == "discriminator tail" else backends[:1]:
                errors = [relative_error(v, e) for v, e in zip(_outputs(run, inputs, backend, dtype), exact)]
                # One rounding of the result is granted: the two may round a tie apart.
                right = all(a <= b + torch.finfo(dtype).eps for a, b in zip(errors, reference))
                row = {"operation": name, "by": backend, "dtype": str(dtype).removeprefix("torch.")}
                found.append(row | {"error": max(errors), "reference_error": max(reference), "right": right})
    return found


def _outputs(run: Run, tensors: list[torch.Tensor], backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """What an operation gives, and its gradients for the same upstream values in every call, exact in `dtype`."""
    out = run(tensors, backend)
    generator = torch.Generator(out.device).manual_seed(0)
    upstream = torch.randn(out.shape, generator=generator, device=out.device) if out.dim() else torch.ones_like(out)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream.to(dtype).to(out.dtype))]


def integers(sizes: Sizes, device: str, backend: str) -> list[dict[str, Any]]:
    """Replaced ids and labels are the reference's; samples too, but where two candidates are closer than rounding."""
    B, S, N = sizes.batch, sizes.seq_len, sizes.slots
    ids, sampled = (torch.randint(sizes.vocab, shape, device=device) for shape in ((B, S), (B * N,)))
    positions = torch.randint(S, (B, N), device=device)  # some slots share a position
    weight = (torch.rand(B, N, device=device) > 0.1).float()
    replaced = [replace_and_label(ids, positions, weight, sampled, backend=b) for b in (backend, "reference")]
    logits, rows = torch.randn(sizes.exact_rows * 16, 1000, device=device) * 2, torch.arange(sizes.exact_rows * 16)
    drawn = [sample(logits, seed=1, step=2, row_M=rows.to(device), backend=b) for b in (backend, "reference")]
    shares = {
        "replace + label": float(all(torch.equal(a, b) for a, b in zip(*replaced))),
        "sample": (drawn[0] == drawn[1]).double().mean().item(),
    }
    return [
        {"operation": name, "by": backend, "share_equal": share, "right": share >= (1.0 if "+" in name else 0.999)}
        for name, share in shares.items()
    ]


def chi_square(device: str, backend: str, draws: int, vocab: int) -> list[dict[str, Any]]:
    """p-values of the drawn frequencies for flat, peaked and realistic logits (Zipf's law over the vocabulary)."""
    zipf = -1.1 * torch.arange(1, vocab + 1).float().log()
    found = []
    for name, logits in (("flat", torch.zeros(64)), ("peaked", torch.linspace(0, 8, 64)), ("realistic", zipf)):
        rows = torch.arange(draws, device=device)
        drawn = sample(logits.to(device).expand(draws, -1), seed=3, step=4, row_M=rows, backend=backend)
        observed = drawn.bincount(minlength=len(logits)).double().cpu()
        expected = logits.double().softmax(0) * draws
        rare = expected < 10  # judged together
        if rare.any():
            observed, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (observed, expected))
        p = float(chisquare(observed.numpy(), expected.numpy()).pvalue)
        found.append({"logits": name, "draws": draws, "p": p, "right": p > 1e-3})
    return found


def without_host(sizes: Sizes) -> list[dict[str, Any]]:
    """Forward, sample and backward of the head with every wait for the device made an error, then in a CUDA graph."""
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
    # What a first call sets up (cuBLAS workspaces, compiled kernels) must be there before the capture: on a stream of
    # its own, because the default stream cannot be captured.
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
    # Products may take another cuBLAS kernel in a graph, which moves a near-tie.
    share = (captured[0] == expected[0]).double().mean().item()
    gradients = max(relative_error(a, b.double()) for a, b in zip(captured[1:], expected[1:]))
    return [
        {"what": "the host waits for nothing", "found": waits or "no wait", "right": not waits},
        {"what": "share of equal tokens from a CUDA graph", "found": share, "right": share > 0.999},
        {"what": "gradients from a CUDA graph, relative difference", "found": gradients, "right": gradients < 0.01},
    ]
