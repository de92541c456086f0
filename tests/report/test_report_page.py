"""The report of whole, young, damaged and strange runs; its curves; the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.config_file import dump_yaml, load_config
from electra_dist.errors import UserError
from electra_dist.report.curves import PANELS, panel_svg, smoothed, thinned, write_curves_png
from electra_dist.report.report_page import write_report
from electra_dist.run.environment_record import write_environment
from electra_dist.run.ledger import Event, Ledger
from electra_dist.run.metrics_writer import MetricsWriter, read_metrics
from electra_dist.run.step_records import EvalRecord, StepRecord

CONFIGS = Path(__file__).parents[2] / "configs"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Checker(HTMLParser):
    """Fails on tags that are not closed in order; collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _parse(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


@pytest.fixture(scope="module")
def run_dir(
    tmp_path_factory: pytest.TempPathFactory,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
) -> Path:
    """A finished run of 400 steps that was resumed once at step 200, with its report."""
    run = tmp_path_factory.mktemp("runs") / "my run <b>"
    writer, ledger = MetricsWriter(run, tensorboard=False), Ledger(run)
    (run / "config.yaml").write_text(dump_yaml(load_config(CONFIGS / "demo_cpu.yaml", ["train.num_steps=400"])))
    ledger.append("start", 0, attempt=1, ranks=2)
    for step in range(10, 401, 10):
        writer.write(step_record(step=step, mlm_loss=2 + 900 / (step + 100), rtd_loss=0.1 + 50 / (step + 100)))
        if step % 100 == 0:
            writer.write(eval_record(step=step, auc=0.5 + step / 1000))
            ledger.append("checkpoint", step, stall_s=0.25)
        if step == 250:
            ledger.append("resume", 200, attempt=2, repeated=50)
    ledger.append("done", 400)
    writer.close()
    ledger.close()
    write_environment(run, world_size=2)
    assert write_report(run) == run / "report.html"
    return run


def test_a_finished_run(run_dir: Path):
    assert not (run_dir / "report.html.tmp").exists()
    page = (run_dir / "report.html").read_text()
    parsed = _parse(page)
    assert page.count("<svg") == len(PANELS)
    for text in (
        "my run <b>",  # escaped
        "finished: step 400 of 400",
        "0.9000",  # the last AUC
        "2 starts",
        "50 steps lost",
        "Where the time went: ",
        "4 checkpoints, the newest of step 400, each held the training up for 0.25 s (median).",
        "attempt 2, repeated 50",
        f"vocab_size: {load_config(run_dir / 'config.yaml').model.vocab_size}",
        "deepspeed",
    ):
        assert text in parsed.text, text
    assert len(page) < 400_000


def test_nothing_is_loaded_from_elsewhere(run_dir: Path):
    page = (run_dir / "report.html").read_text()
    parsed = _parse(page)
    addresses = [value for name, value in parsed.attributes if name in ("src", "href", "xlink:href", "data") and value]
    assert all(value.startswith("#") for value in addresses)
    assert not re.findall(r"@import|url\((?!#)|<script|<link|<img", page)


def test_curves_take_their_colours_from_the_page(run_dir: Path):
    records = read_metrics(run_dir)
    for panel in PANELS:
        svg = panel_svg(panel, records, resumes=[200])
        assert svg is not None
        root = ET.fromstring(svg)
        assert "width" not in root.attrib
        assert root.attrib["viewBox"]
        assert "var(--ink)" in svg
        assert "var(--series-1)" in svg or "var(--series-2)" in svg
        assert not re.findall(r"#0[1-4]0[1-4]0[1-4]", svg)
        assert panel.title in "".join(root.itertext())


def test_a_run_without_a_step_and_one_with_nothing_but_undefined_values(
    tmp_path: Path, step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    assert "No step has been recorded yet" in write_report(tmp_path).read_text()
    nan = float("nan")
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(step_record(mlm_loss=nan, rtd_loss=nan, replaced_accuracy=nan, grad_norm=float("inf"), mfu=None))
    writer.write(eval_record(auc=nan))
    writer.close()
    page = write_report(tmp_path).read_text()
    _parse(page)
    assert "MFU" not in page
    write_curves_png(tmp_path, tmp_path / "curves.png")


@pytest.mark.parametrize(("event", "text"), [("stop", "stopped on purpose after step 30"), ("crash", "crashed after")])
def test_how_it_ended(tmp_path: Path, event: Event, text: str):
    ledger = Ledger(tmp_path)
    ledger.append("start", 0)
    ledger.append(event, 30)
    ledger.close()
    assert text in _parse(write_report(tmp_path).read_text()).text


def test_no_run_folder_is_a_user_error(tmp_path: Path):
    with pytest.raises(UserError, match="no such run folder"):
        write_report(tmp_path / "typo")


def test_the_picture_is_a_png_of_the_stated_size(run_dir: Path, tmp_path: Path):
    picture = write_curves_png(run_dir, tmp_path / "curves.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")) == (1500, 900)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 40))
def test_thinning_keeps_order_ends_and_extremes(values: list[float], buckets: int):
    steps = np.arange(len(values), dtype=float) * 10
    thin_steps, thin_values = thinned(steps, np.array(values), buckets)
    assert len(thin_values) <= 2 * buckets + 2
    assert list(thin_steps) == sorted(set(thin_steps))
    assert {values[int(step) // 10] for step in thin_steps} == set(thin_values)
    assert (thin_steps[0], thin_steps[-1]) == (steps[0], steps[-1])
    assert (thin_values.min(), thin_values.max()) == (min(values), max(values))


def test_smoothing_keeps_a_constant_and_a_lines_middle():
    assert smoothed(np.full(50, 3.0)) == pytest.approx(np.full(50, 3.0))
    line = np.arange(1001.0)
    assert smoothed(line)[500] == pytest.approx(500, abs=1e-3)  # no lag
