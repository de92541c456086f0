import torch
from electra_kernels.operation_types import SpecialIds
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.model.attention import attention_bias, derive

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
EXAMPLES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=0, max_size=4)


def build(examples: list[tuple[int, int]], num_pads: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """A row written example by example, with what each token should be: (example, position, type)."""
    ids: list[int] = []
    truth: list[tuple[int, int, int]] = []
    for number, (first, second) in enumerate(examples):
        tokens = [(2, 0), *[(9, 0)] * first, (3, 0)]
        if second:
            tokens += [*[(8, 1)] * second, (3, 1)]
        ids += [token for token, _ in tokens]
        truth += [(number, position, kind) for position, (_, kind) in enumerate(tokens)]
    return ids + [0] * num_pads, truth + [(-1, 0, 0)] * num_pads


@given(st.lists(EXAMPLES, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_derive_equals_the_row_as_it_was_written(batch: list[list[tuple[int, int]]]) -> None:
    width = 1 + max(len(build(examples, 0)[0]) for examples in batch)
    built = [build(examples, width - len(build(examples, 0)[0])) for examples in batch]
    layout = derive(torch.tensor([ids for ids, _ in built]), SPECIAL)
    truth = torch.tensor([rows for _, rows in built])
    assert torch.equal(layout.example_BS, truth[..., 0])
    assert torch.equal(layout.position_BS, truth[..., 1])
    assert torch.equal(layout.token_type_BS, truth[..., 2])
    assert torch.equal(layout.is_real_BS, truth[..., 0] >= 0)


def test_bias_is_open_inside_an_example_only_and_never_shut_for_a_query() -> None:
    ids = torch.tensor([build([(2, 1), (3, 0)], 3)[0], [0] * 14])
    layout = derive(ids, SPECIAL)
    bias = attention_bias(layout, torch.float32)[:, 0]
    for b in range(2):
        for i in range(14):
            for j in range(14):
                together = layout.example_BS[b, i] == layout.example_BS[b, j]
                assert bias[b, i, j] == (0.0 if together else float("-inf"))
    assert (bias == 0).any(-1).all()


def test_special_ids_from_the_manifest() -> None:
    names = {"[MASK]": 103, "[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102}
    assert SpecialIds.from_tokens(names) == SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)
