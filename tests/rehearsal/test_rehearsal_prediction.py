"""benchmarks/predict_gpu.py: its counts against model/flops.py; every assumption is printed with what tests it."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import pytest
from support.rehearsal_cases import REPOSITORY

from electra_dist.config_file import load_config
from electra_dist.model.flops import token_flops

SCRIPT = REPOSITORY / "benchmarks" / "predict_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("predict_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "predict_gpu", module)  # where its dataclasses look for their module
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prediction(script: ModuleType) -> dict[str, Any]:
    return script.predict(load_config(REPOSITORY / "configs" / "base_size.yaml", []), rows=16, chosen={})


def test_the_rehearsal_has_the_flops_of_the_model(prediction: dict[str, Any]) -> None:
    config = load_config(REPOSITORY / "configs" / "base_size.yaml", [])
    model = config.model
    tokens = 16 * 512
    flops = token_flops(model, 512, config.objective).total * tokens
    towers = (model.discriminator, model.generator)
    attention = sum(3 * 4 * 512 * tower.hidden_size * tower.num_layers for tower in towers) * tokens
    # The rehearsal also has the empty slots and the padded vocabulary.
    assert prediction["counts"]["product_flops"] == pytest.approx(flops - attention, rel=0.01)


def test_the_prediction_adds_up_and_says_what_it_is(prediction: dict[str, Any]) -> None:
    assert prediction["kind"].startswith("prediction")
    assert sum(part["ms"] for part in prediction["parts"]) == pytest.approx(prediction["device_ms"])
    assert prediction["step_ms"] == max(prediction["device_ms"], prediction["host_ms"])
    assert prediction["tokens_per_s"] == pytest.approx(1e3 * 16 * 512 / prediction["step_ms"])
    assert prediction["worst"]["step_ms"] > prediction["step_ms"] > prediction["best"]["step_ms"]
    gpu_parts = (REPOSITORY / "benchmarks" / "gpu.py").read_text()
    for name, assumption in prediction["assumptions"].items():
        low, high = assumption["range"]
        assert low <= assumption["value"] <= high, name
        script, part = assumption["tested_by"].split(", part ")
        assert script == "benchmarks/gpu.py"
        assert f'"{part}"' in gpu_parts, f"benchmarks/gpu.py has no part {part}"


def test_text_names_every_assumption(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = [str(REPOSITORY / "configs" / "small.yaml"), "--rows", "2", "--set", "product_tflops=650"]
    script.main([*options, "--json"])
    assert json.loads(capsys.readouterr().out)["assumptions"]["product_tflops"]["value"] == 650
    script.main(options)
    text = capsys.readouterr().out
    assert text.startswith("PREDICTION, not a measurement")
    assert "product_tflops    650 (600 to 790) TFLOP/s" in text
    assert text.count("benchmarks/gpu.py, part") == 15
