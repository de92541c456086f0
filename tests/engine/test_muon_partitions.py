"""Muon at ZeRO stages 1 and 2: whole matrices, float64, exact restarts, refused steps, and refused layouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_processes import finish_ranks, start_ranks
from support.real_runs import tiny_tree
from torch import nn

from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.engine.optimizers import muon
from electra_dist.engine.optimizers.matrix_partition import MatrixPartition
from electra_dist.engine.optimizers.muon import ForeachMuon, adopt_partitions
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.build_objective import build_objective

WORKER = Path(__file__).parent / "muon_worker.py"
CPU = torch.device("cpu")
# Of a weight, in learning rates. fp32 rounds by 6e-8, and five iterations multiply small singular values by up to
# 3.4445**5 = 485. An element of another matrix would differ by about 0.2.
FP32_ROUNDING = 1e-4
PRECISIONS = ("fp32", "bf16", "fp16")

Shape = st.tuples(st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=100, deadline=None)
@given(shapes=st.lists(Shape, min_size=1, max_size=7), num_ranks=st.integers(1, 12), padding=st.integers(0, 8))
def test_ranks_get_exactly_the_matrices_that_they_share_and_own_each_element_once(
    shapes: list[tuple[int, int]], num_ranks: int, padding: int
) -> None:
    """The exchange is made by hand: each rank gets what every rank has for it, in the order of the ranks."""
    matrices = [np.random.default_rng(number).normal(size=shape) for number, shape in enumerate(shapes)]
    flat = np.concatenate([matrix.ravel() for matrix in matrices])
    partition_numel = -(-(len(flat) + padding) // num_ranks)
    padded = np.zeros(partition_numel * num_ranks)
    padded[: len(flat)] = flat
    values = torch.from_numpy(padded).split(partition_numel)
    partitions = [MatrixPartition(shapes, partition_numel, rank, num_ranks, CPU) for rank in range(num_ranks)]
    sent = [partition.outgoing(values[rank]) for rank, partition in enumerate(partitions)]

    result = np.zeros_like(padded)
    for rank, partition in enumerate(partitions):
        received = [parts[rank] for parts in sent]
        assert [len(part) for part in received] == partition.incoming_numels()
        # A rank needs no more than its own elements and the rest of two matrices.
        assert sum(map(len, received)) <= partition_numel + 2 * 81
        own = np.zeros(partition_numel)
        for whole in partition.whole_matrices(torch.cat(received)):
            assert any(np.array_equal(whole.values, matrix) for matrix in matrices)
            own[whole.in_partition] += whole.values.reshape(-1)[whole.own].numpy()
        result[rank * partition_numel : (rank + 1) * partition_numel] = own
    assert np.array_equal(result, padded)


def test_partitions_that_are_too_small_for_the_matrices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="2 partitions of 5 elements cannot hold matrices of 12 elements"):
        MatrixPartition([(3, 4)], 5, 0, 2, CPU)


def lines_of(output: str, kind: str) -> dict[str, list[str]]:
    """Return from place to the other fields of the lines of one kind that a rank has printed."""
    fields = [line.split() for line in output.splitlines() if line.startswith(kind + " ")]
    return {place: rest for _, place, *rest in fields}


def run_places(places: dict[int, list[str]]) -> dict[int, dict[str, list[str]]]:
    """Run the worker at places of each number of ranks; check what it measured, and return the losses by place."""
    started = {num_ranks: start_ranks(WORKER, num_ranks, *names) for num_ranks, names in places.items()}
    losses = {}
    for num_ranks, processes in started.items():
        outputs = finish_ranks(processes)
        for output in outputs:
            measured = lines_of(output, "MEASURED")
            assert list(measured) == places[num_ranks]
            assert all(float(difference) < FP32_ROUNDING for [difference] in measured.values()), measured
            assert set(map(tuple, lines_of(output, "RESUMED").values())) == {("1", "2", "5")}
            assert list(lines_of(output, "REFUSED")) == places[num_ranks]
            assert lines_of(output, "LOSSES") == lines_of(outputs[0], "LOSSES")
        losses[num_ranks] = lines_of(outputs[0], "LOSSES")
        assert all(len(set(steps)) == 6 for steps in losses[num_ranks].values())
    return losses


@pytest.mark.multiproc
@pytest.mark.sample
def test_muon_at_stage_1_equals_float64_and_its_losses_are_those_of_stage_0_and_of_one_rank() -> None:
    """Each rank also resumes bit for bit at three cuts, and a refused step leaves weights and momenta as they were."""
    losses = run_places({2: ["0,fp32", "1,fp32", "1,bf16"], 1: ["1,bf16"]})
    assert losses[2]["1,fp32"] == losses[2]["0,fp32"]
    assert losses[2]["1,bf16"] == losses[1]["1,bf16"]


@pytest.mark.drill
@pytest.mark.multiproc
def test_muon_at_every_stage_and_precision_and_with_offloading() -> None:
    """Stage 0 in fp16 comes last: DeepSpeed's autocast of it stays on for the engines after it in a process."""
    places = [f"{stage},{precision}" for precision in PRECISIONS for stage in (1, 2)]
    places += [f"{stage},{precision},offload" for precision in ("fp32", "fp16") for stage in (1, 2)]
    places += ["0,fp32", "0,bf16", "0,fp16"]
    losses = run_places({1: places}) | run_places({2: places})
    in_fp32 = [losses[num_ranks][place] for num_ranks in (1, 2) for place in places if "fp32" in place]
    assert all(values == in_fp32[0] for values in in_fp32)
    for place in ("0,bf16", "1,bf16"):
        assert losses[1][place] == losses[2][place]


SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_of_a_divided_matrix_that_is_not_orthogonal_ends_the_start(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"optimizer.name": "muon", "engine.zero_stage": 1, "train.precision": precision}
    config = Config.model_validate(tiny_tree("unused", "unused", **fields))  # type: ignore[arg-type]
    module = build_objective(config.model, config.objective, SPECIAL, 3)
    monkeypatch.setattr(muon, "orthogonalize", lambda matrix: matrix)
    with pytest.raises(RuntimeError, match="the update of a test matrix has singular values from"):
        Engine(module, config.train, config.engine, config.optimizer)


@pytest.mark.usefixtures("one_rank")
def test_a_layout_with_gaps_between_parameters_is_refused() -> None:
    """DeepSpeed's record says that the second parameter begins 4 elements later than Muon expects."""
    parameters = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(2, 4))]
    groups = [{"params": parameters, "num_matrices": 1}]
    base = ForeachMuon(groups, lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)
    base.param_groups[0]["params"] = [nn.Parameter(torch.zeros(24))]
    for parameter, start in zip(parameters, (0, 16)):
        address = SimpleNamespace(start=start, numel=parameter.numel())
        in_parameter = SimpleNamespace(start=0, numel=parameter.numel())
        parameter._hp_mapping = SimpleNamespace(hp_fragment_address=address, lp_fragment_address=in_parameter)
    with pytest.raises(RuntimeError, match=r"shape \(2, 4\) from element 16 of its group on, .* at 12"):
        adopt_partitions(SimpleNamespace(optimizer=base), CPU)
