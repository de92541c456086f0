"""FlashAttention's sequences are the examples of the rows, dropout reaches its operator, nothing is copied twice."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest
import torch
from electra_kernels.layer_passes import join_gradients
from electra_kernels.operation_types import LayerDropout, SpecialIds
from support import flash_definition
from support.torch_versions import needs_products_on_meta
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model import flash_attention as flash
from electra_dist.model.attention import FlashMask, LayerMask, SdpaMask, derive
from electra_dist.model.encoder import DropoutKeys, SelfAttention, compile_layers
from electra_dist.model.flash_attention import ExampleBounds, example_bounds, flash_attention
from electra_dist.objectives.base import Objective, StepInput
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
OBJECTIVES = ["rtd", "mlm", "rtd_masked_only", "replace_mlm", "all_tokens_mlm", "adversarial"]


def random_rows(num_rows: int, num_tokens: int, shortest: int, longest: int, seed: int = 0) -> np.ndarray:
    """Rows of packed examples, some with pads at the end; the last row is all pads, the one before it has none."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, 60, (num_rows, num_tokens)).astype(np.uint16)
    for row in ids:
        filled = num_tokens if row is ids[-2] else int(rng.integers(0, num_tokens + 1))
        row[filled:] = SPECIAL.pad
        first = 0
        while first < filled:
            row[first] = SPECIAL.cls
            first += int(rng.integers(shortest, longest + 1))
    ids[-1] = SPECIAL.pad
    return ids


@pytest.fixture
def definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators by their definition, in place of torch's, which a CPU does not have."""
    monkeypatch.setattr(flash, "_forward_operator", flash_definition.forward)
    monkeypatch.setattr(flash, "_backward_operator", flash_definition.backward)


@pytest.mark.parametrize(("shortest", "longest"), [(5, 9), (5, 60), (40, 128), (128, 128)])
def test_bounds_are_where_the_example_of_a_token_changes(shortest: int, longest: int) -> None:
    """Independently: the lengths of runs of equal (row, example) among all tokens, by `derive` and `itertools`."""
    for seed in range(5):
        ids = random_rows(6, 128, shortest, longest, seed)
        bounds = example_bounds(ids, SPECIAL)
        example_BS = derive(torch.from_numpy(ids.astype(np.int64)), SPECIAL).example_BS
        names = [(row, example) for row, line in enumerate(example_BS.tolist()) for example in line]
        changes = [0, *(at for at in range(1, len(names)) if names[at] != names[at - 1])]
        found = bounds.cu_seqlens.tolist()
        assert found[: len(changes)] == changes
        assert set(found[len(changes) :]) == {ids.size}
        assert bounds.longest == 128 and bounds.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(("shortest", "longest"), [(5, 9), (5, 60), (128, 128)])
def test_the_number_of_sequences_is_the_rows_times_the_least_power_of_two_that_holds_them(
    shortest: int, longest: int
) -> None:
    for seed in range(9):
        ids = random_rows(8, 128, shortest, longest, seed)
        cu_seqlens = example_bounds(ids, SPECIAL).cu_seqlens
        num_sequences = len(cu_seqlens) - 1
        num_filled = int((cu_seqlens.diff() > 0).sum())
        assert num_sequences in {8 * 2**power for power in range(1, 7)}
        assert num_filled <= num_sequences
        assert num_sequences == 2 * 8 or num_filled > num_sequences // 2


@pytest.mark.parametrize("reach", [None, 3, 17])
def test_the_definition_is_sdpa_and_each_example_alone(definition: None, reach: int | None) -> None:
    ids = random_rows(4, 64, 5, 40)
    bounds = example_bounds(ids, SPECIAL)
    layout = derive(torch.from_numpy(ids.astype(np.int64)), SPECIAL)
    keys = LayerDropout(torch.zeros(3), torch.arange(4), "reference")
    qkv = torch.randn(4 * 64, 3 * 2 * 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(4 * 64, 2 * 8, dtype=torch.float64)
    masks: list[LayerMask] = [
        backend.of_rows(layout, torch.float64, bounds, reach) for backend in (FlashMask, SdpaMask)
    ]
    out, expected = (mask.attend(qkv, 2, 0.0, keys) for mask in masks)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(each, qkv, upstream, retain_graph=True)[0] for each in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)

    starts = bounds.cu_seqlens.unique().tolist()
    assert len(starts) > 8
    for first, end in itertools.pairwise(starts):
        alone = ExampleBounds(torch.tensor([0, end - first], dtype=torch.int32), end - first)
        torch.testing.assert_close(
            flash_attention(qkv[first:end], 2, alone, reach=reach), out[first:end], rtol=0, atol=1e-14
        )


def small_objective(name: str = "rtd", attention_dropout: float = 0.0) -> Objective:
    """A model without hidden dropout, with heads of width 8."""
    tower = {"num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    model = ModelConfig(
        vocab_size=64,
        embedding_size=16,
        max_positions=64,
        hidden_dropout=0.0,
        attention_dropout=attention_dropout,
        generator=TowerConfig(hidden_size=16, **tower),
        discriminator=TowerConfig(hidden_size=16, **tower),
    )
    return build_objective(model, ObjectiveConfig(name=cast(Any, name)), SPECIAL, seed=3)


def step_input(ids: np.ndarray, bounds: ExampleBounds | None) -> StepInput:
    return StepInput(
        torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids)), 0, 3, 1 / 30, 1 / 200, bounds=bounds
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_has_the_loss_and_gradients_of_sdpa(name: str, definition: None) -> None:
    ids = random_rows(3, 64, 5, 40)
    bounds = example_bounds(ids, SPECIAL)
    found = {}
    for backend in (SdpaMask, FlashMask):
        module = small_objective(name).double()
        module.attention = backend
        loss = module(step_input(ids, bounds)).loss
        found[backend.name] = [loss, *torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)]
    torch.testing.assert_close(found["flash"], found["sdpa"], rtol=1e-9, atol=1e-12)


def test_a_layer_sums_the_gradient_of_the_bias_of_query_key_and_value_where_it_joins_their_gradients(
    definition: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against autograd through the definition of the layer, in float64; the product's own sum is not computed."""
    ids = random_rows(3, 64, 5, 40)
    mask = FlashMask(example_bounds(ids, SPECIAL))
    layer = small_objective().double().towers.discriminator.layers[0]
    keys = DropoutKeys.off(torch.from_numpy(ids)).of_layers(1)[0]
    hidden_TH = torch.randn(ids.size, 16, dtype=torch.float64)
    upstream_TH = torch.randn(ids.size, 16, dtype=torch.float64)
    parameters = list(layer.parameters())
    out_TH = layer.compose(hidden_TH, mask, keys)
    expected = torch.autograd.grad(out_TH, parameters, upstream_TH)
    joined: list[tuple[torch.Tensor, ...]] = []

    def record(*arguments: Any) -> Any:
        joined.append(join_gradients(*arguments))
        return joined[-1]

    monkeypatch.setattr(flash, "join_gradients", record)
    found = torch.autograd.grad(layer(hidden_TH, mask, keys), parameters, upstream_TH)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    names = [name for name, _ in layer.named_parameters()]
    ((_, sum_of_bias),) = joined
    assert found[names.index("attention.qkv.bias")] is sum_of_bias


def test_an_input_without_bounds_is_refused() -> None:
    module = small_objective()
    module.attention = FlashMask
    with pytest.raises(ValueError, match=r"needs StepInput\.bounds"):
        module(step_input(random_rows(3, 64, 5, 40), None))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.25])
def test_the_operator_gets_the_dropout_of_the_config_the_bounds_and_views_of_one_product(
    is_training: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def record_forward(*args: Any, **window: Any) -> Any:
        calls.append(args)
        assert set(window.values()) == {None}
        return flash_definition.forward(*args)

    def record_backward(*args: Any, **window: Any) -> Any:
        calls.append(args)
        assert set(window.values()) == {None}
        return flash_definition.backward(*args)

    monkeypatch.setattr(flash, "_forward_operator", record_forward)
    monkeypatch.setattr(flash, "_backward_operator", record_backward)
    module = small_objective(attention_dropout=dropout).double().train(is_training)
    module.attention = FlashMask
    ids = random_rows(3, 64, 5, 40)
    bounds = example_bounds(ids, SPECIAL)
    module(step_input(ids, bounds)).loss.backward()
    expected = dropout if is_training else 0.0
    assert len(calls) == 2 * 4  # two layers of two towers, forward and backward
    for query, key, value, cu_q, cu_k, max_q, max_k, probability, is_causal, debug in calls[:4]:
        assert (probability, is_causal, debug) == (expected, False, False)
        assert (max_q, max_k) == (64, 64)
        assert cu_q is cu_k is bounds.cu_seqlens
        assert query.shape == (3 * 64, 2, 8)
        addresses = [part.data_ptr() - query.data_ptr() for part in (query, key, value)]
        assert addresses == [0, 16 * 8, 2 * 16 * 8]  # one after another in each token's part of the product
        assert query.stride() == key.stride() == value.stride() == (3 * 16, 8, 1)
    for _, query, _, _, _, _, cu_q, cu_k, max_q, max_k, probability, is_causal, state, _ in calls[4:]:
        assert (probability, is_causal, max_q, max_k) == (expected, False, 64, 64)
        assert cu_q is cu_k is bounds.cu_seqlens
        assert query.stride() == (3 * 16, 8, 1)
        assert state.dtype == torch.uint64 and state.shape == (2,)


def test_dropout_keeps_its_share_and_its_scale_and_follows_torchs_seed(definition: None) -> None:
    """With equal scores and values of 1, an output is the share of kept weights over 1 - p: its mean is 1."""
    qkv = torch.zeros(64, 3, 32, 8)
    qkv[:, 2] = 1.0
    bounds = ExampleBounds(torch.tensor([0, 64], dtype=torch.int32), 64)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(flash_attention(qkv.view(64, -1), 32, bounds, 0.25).view(64, 32, 8))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    # Mean and deviation of the sum of 64 weights of 1/64, each kept with 3/4 and scaled by 4/3.
    assert abs(outs[0][..., 0].mean().item() - 1) < 0.005
    assert abs(outs[0][..., 0].std().item() - (1 / 3 / 64) ** 0.5) < 0.005


class Names(TorchDispatchMode):
    """Records the names of the operators of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, dropout_p: float
) -> torch.Tensor:
    """One of the kernels that torch's scaled_dot_product_attention picks on a GPU; on `meta` it has none."""
    bias = attn_mask.expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return cast(torch.Tensor, kernel(query, key, value, bias, True, dropout_p)[0])


@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_the_gradients_of_query_key_and_value_are_copied_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused_attention)
    model = ModelConfig(
        generator=TowerConfig(hidden_size=64, num_layers=1, num_heads=1, intermediate_size=64),
        discriminator=TowerConfig(hidden_size=128, num_layers=1, num_heads=2, intermediate_size=64),
    )
    with torch.device("meta"):
        module = SelfAttention(model, model.discriminator).bfloat16()
        hidden_BSH = torch.empty(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
        mask: LayerMask = SdpaMask(torch.empty(2, 1, 64, 64, dtype=torch.bfloat16))
        if backend == "flash":
            mask = FlashMask(ExampleBounds(torch.empty(5, dtype=torch.int32), 64))
        out_BSH = module(hidden_BSH, mask, LayerDropout(torch.empty(3), torch.empty(2), "reference"))
    with Names() as recorded:
        out_BSH.backward(torch.empty_like(out_BSH))
    assert recorded.names.count("stack") == 1
    assert "clone" not in recorded.names
    if backend == "flash":
        assert recorded.names.count("_flash_attention_backward") == 1


@needs_products_on_meta
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_whole_step_on_meta_reaches_every_parameter(name: str) -> None:
    """Torch's own shapes of both operators; no tensor but the ids' bounds is on the host."""
    module = small_objective(name, attention_dropout=0.1).bfloat16().train().to("meta")
    module.backend = "reference"
    module.attention = FlashMask
    host_ids = random_rows(3, 64, 5, 40)
    bounds = example_bounds(host_ids, SPECIAL).to(torch.device("meta"))
    ids = torch.empty(3, 64, dtype=torch.int64, device="meta")
    scales = 1.0 / module.loss_counts(ids).sum(0)
    module(StepInput(ids, torch.arange(3, device="meta"), 0, 3, *scales, bounds=bounds)).loss.backward()
    missing = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert not missing


@pytest.mark.parametrize("enabled", [True, False])
def test_the_backward_operator_alone_runs_in_the_strict_deterministic_mode(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch takes FlashAttention's atomic additions where the mode only warns."""
    modes: list[tuple[bool, bool]] = []

    def mode() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def record(function: Any) -> Any:
        def recorded(*args: Any, **window: Any) -> Any:
            modes.append(mode())
            return function(*args, **window)

        return recorded

    monkeypatch.setattr(flash, "_forward_operator", record(flash_definition.forward))
    monkeypatch.setattr(flash, "_backward_operator", record(flash_definition.backward))
    qkv = torch.randn(8, 3 * 8, requires_grad=True)
    bounds = ExampleBounds(torch.tensor([0, 8], dtype=torch.int32), 8)
    try:
        torch.use_deterministic_algorithms(enabled, warn_only=True)
        flash_attention(qkv, 1, bounds).sum().backward()
        assert modes == [(enabled, True), (enabled, not enabled)]
        assert mode() == (enabled, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_layers_call_the_same_operators_with_one_graph_for_any_bounds(definition: None) -> None:
    batches = [random_rows(3, 64, shortest, longest) for shortest, longest in ((64, 64), (5, 9), (20, 30))]
    all_bounds = [example_bounds(ids, SPECIAL) for ids in batches]
    assert len({len(bounds.cu_seqlens) for bounds in all_bounds}) == 3
    eager, compiled = (small_objective("mlm", attention_dropout=0.1).train() for _ in range(2))
    torch._dynamo.reset()
    counters.clear()
    compile_layers(compiled, backend="aot_eager")
    for ids, bounds in zip(batches, all_bounds):
        found = []
        for module in (eager, compiled):
            module.attention = FlashMask
            torch.manual_seed(5)
            loss = module(step_input(ids, bounds)).loss
            found.append([loss, *torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
