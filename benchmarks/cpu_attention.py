"""Compare attention in bf16 on one CPU core by plain operations with torch's fused operator, forward and backward.

    python benchmarks/cpu_attention.py         # rows of 64, 128 and 512 tokens

`electra_dist/model/attention.py` takes plain operations up to 128 tokens on CPUs with bf16 instructions. Both variants
get the same queries, keys and values, as views of one tensor, and take turns in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from measure import Json, ResultLine, alternate, finish, format_summary, parser, print_table, ratio, summary

from electra_dist.model.attention import attend_with_plain_operations
from electra_dist.model.matrix_products import HAS_BF16_PRODUCTS

SHAPES = ((32, 64), (16, 128), (4, 512))  # (rows, tokens of a row)
_HEADS, _HEAD_WIDTH = 4, 64
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def pass_over(attention: Attention, rows: int, tokens: int) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass of an attention function on random rows.

    Args:
        attention: maps queries, keys and values [B, N, S, D] and a bias [B, 1, S, S] to the context [B, N, S, D].
        rows: number of rows B.
        tokens: tokens S of a row.
    """
    qkv_BS3ND = torch.randn(rows, tokens, 3, _HEADS, _HEAD_WIDTH, dtype=torch.bfloat16, requires_grad=True)
    bias_B1SS = torch.zeros(rows, 1, tokens, tokens, dtype=torch.bfloat16)
    upstream_BNSD = torch.randn(rows, tokens, _HEADS, _HEAD_WIDTH, dtype=torch.bfloat16).transpose(1, 2)

    def run() -> None:
        """Compute the context and the gradient of queries, keys and values."""
        query, key, value = (part.transpose(1, 2) for part in qkv_BS3ND.unbind(2))
        torch.autograd.grad(attention(query, key, value, bias_B1SS), qkv_BS3ND, upstream_BNSD)

    return run


def main(argv: Sequence[str] | None = None) -> Json:
    """Time all shapes, print a table and return the record."""
    arguments = parser(__doc__, rounds=30).parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seconds: dict[str, Json] = {}
    table = []
    lines = []
    for rows, tokens in SHAPES[:1] if arguments.smoke else SHAPES:
        passes = {
            "plain": pass_over(attend_with_plain_operations, rows, tokens),
            "fused": pass_over(F.scaled_dot_product_attention, rows, tokens),
        }
        taken = alternate(passes, 2 if arguments.smoke else arguments.rounds, warm_up=3)
        fused_by_plain = ratio(taken["fused"], taken["plain"])
        plain_ms = 1e3 * summary(taken["plain"])["median"]
        seconds[f"{rows} x {tokens}"] = {name: summary(samples) for name, samples in taken.items()}
        table.append([f"{rows} rows of {tokens}", f"{plain_ms:.1f}", format_summary(fused_by_plain)])
        lines.append(
            ResultLine(
                f"attention by plain operations, bf16, {rows} rows of {tokens} tokens, 4 heads of 64, one core",
                f"{plain_ms:.1f} ms forward and backward",
                f"{fused_by_plain['median']:.2f} x torch's fused operator (its time by ours)",
            )
        )
    print_table(["shape", "plain, ms", "fused / plain"], table)
    return finish("cpu_attention", arguments, argv, lines, bf16_instructions=HAS_BF16_PRODUCTS, seconds=seconds)


if __name__ == "__main__":
    main()
