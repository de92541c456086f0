"""The matrix products of a profile are found with the shapes that the profiled code gave them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from electra_dist.train import step_operators
from electra_dist.train.step_operators import product_shapes, products_alone_s


def test_all_products_of_a_linear_layer_and_its_gradients_are_found() -> None:
    layer = torch.nn.Linear(5, 7)
    inputs = torch.randn(3, 5, requires_grad=True)

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        layer(inputs).sum().backward()

    shapes = product_shapes(profiler.events())
    forward = ((3, 5), (5, 7))
    gradient_of_input = ((3, 7), (7, 5))
    gradient_of_weight = ((7, 3), (3, 5))
    assert shapes == {forward: 1, gradient_of_input: 1, gradient_of_weight: 1}


def test_a_product_that_is_added_in_place_is_found() -> None:
    table = torch.zeros(3, 7)

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        table.addmm_(torch.randn(3, 5), torch.randn(5, 7))

    assert product_shapes(profiler.events()) == {((3, 5), (5, 7)): 1}


def test_other_operators_are_not_products() -> None:
    event = SimpleNamespace(name="aten::add", input_shapes=[[3, 5], [3, 5]])

    assert not product_shapes([event])


def test_each_product_counts_as_often_as_it_occurs_with_its_fastest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = {(2, 3): iter([0.5, 0.25, 1.0]), (4, 5): iter([2.0, 3.0, 4.0])}
    monkeypatch.setattr(step_operators, "_time_product", lambda left, right: next(times_s[tuple(left.shape)]))
    shapes = Counter({((2, 3), (3, 1)): 10, ((4, 5), (5, 1)): 1})

    seconds = products_alone_s(shapes, torch.device("cpu"), torch.float32)

    assert seconds == 10 * 0.25 + 1 * 2.0
