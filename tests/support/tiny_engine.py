"""An engine of two tiny towers for tests that run several ranks, and its whole state as float64 arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from electra_kernels.operation_types import SpecialIds
from support.real_runs import tiny_tree

from electra_dist.collectives import gather
from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.engine.state_fragments import owned_fragments, parameter_shapes
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)

State = dict[str, dict[str, np.ndarray]]  # parameter -> kind ("master", "exp_avg", "exp_avg_sq") -> float64, whole


def tiny_engine(settings: dict[str, Any]) -> tuple[Config, Engine]:
    """Return an engine of two tiny towers with their initial weights, and its config. Collective.

    `settings` are values of config keys, such as {"engine.zero_stage": 1}.
    """
    config = Config.model_validate(tiny_tree("unused", "unused", **settings))  # type: ignore[arg-type]
    module = build_objective(config.model, config.objective, SPECIAL, 3)
    engine = Engine(module, config.train, config.engine, config.optimizer)
    if engine.loss_scale is not None:
        engine.loss_scale.cur_scale = 256.0  # the initial one overflows here
    return config, engine


def whole_state(engine: Engine) -> State:
    """Return masters and moments of whole parameters, in their shapes, on every rank. Collective."""
    own = []
    for fragment in owned_fragments(engine):
        for kind, view in fragment.views.items():
            own.append([fragment.name, kind, fragment.start, view.double().tolist()])
    state: State = {}
    shapes = parameter_shapes(engine.deepspeed.module)
    for name, shape in shapes.items():
        state[name] = {kind: np.full(int(np.prod(shape)), np.nan) for kind in ("master", "exp_avg", "exp_avg_sq")}
    for fragments in gather(own):
        for name, kind, start, values in fragments:
            state[name][kind][start : start + len(values)] = values
    return {
        name: {kind: values.reshape(shapes[name]) for kind, values in kinds.items()} for name, kinds in state.items()
    }
