"""The report of a run as an HTML page, its curves, and the picture of the curves.

Fixtures: `step_record(...)` and `eval_record(...)` return example records with some fields replaced; `run_dir` is the
folder of a finished run with its report.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from electra_launcher.cli.main import app
from electra_launcher.pretrain import _write_report
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.run_records import EVAL, STEP
from typer.testing import CliRunner

from electra_dist.config.load import dump_yaml, load_config
from electra_dist.errors import UserError
from electra_dist.model.counts import parameter_counts
from electra_dist.report.curves import draw_panel, write_curves_png
from electra_dist.report.panels import PANELS, Curve, RunCurves, baselines, columns_of, guessed_by_recall
from electra_dist.report.report_page import write_report
from electra_dist.run.environment_record import commit, write_environment
from electra_dist.run.ledger import Event, Ledger
from electra_dist.run.metrics import EvalRecord, MetricsWriter, StepRecord, TextSample, read_metrics

CONFIGS = Path(__file__).parents[2] / "configs"
TAGS_WITHOUT_END = {"meta", "br", "hr", "img", "input", "link"}


class PageParser(HTMLParser):
    """Parser that fails on tags that are not closed in order, and collects the text and the attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in TAGS_WITHOUT_END:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed_page(page: str) -> PageParser:
    """Return the parser after a whole page, all of whose tags must be closed."""
    parser = PageParser()
    parser.feed(page)
    parser.close()
    assert parser.open_tags == []
    return parser


@pytest.fixture(scope="module")
def run_dir(
    tmp_path_factory: pytest.TempPathFactory,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
) -> Path:
    """The folder of a finished run of 400 steps, with its report.

    The run was resumed once, at step 200 after step 250, and made an evaluation and a checkpoint every 100 steps. Its
    name holds a tag, which the report must escape.
    """
    run = tmp_path_factory.mktemp("runs") / "my run <b>"
    writer = MetricsWriter(run)
    ledger = Ledger(run)
    changes = ["train.num_steps=400", "log.kwh_price=0.5", "cluster.notify=curl https://example.org/my-secret"]
    config = load_config(CONFIGS / "demo_cpu_bert.yaml", changes)
    (run / "config.yaml").write_text(dump_yaml(config))
    ledger.append("start", 0, attempt=1, ranks=2)
    for step in range(10, 401, 10):
        mlm_loss = 2 + 900 / (step + 100)
        rtd_loss = 0.1 + 50 / (step + 100)
        scheduled = {"temperature": 1 + 3 / step, "rtd_weight": step / 8, "random_share": 1 - step / 400}
        writer.write(step_record(step=step, mlm_loss=mlm_loss, rtd_loss=rtd_loss, token_loss=mlm_loss, **scheduled))
        if step % 100 == 0:
            diagnostics = {"context_auc_se": 0.0041, "generator_entropy": 5.1, "sampled_correct": 0.12}
            writer.write(eval_record(step=step, auc=0.5 + step / 1000, context_auc=0.5 + step / 1500, **diagnostics))
            ledger.append("checkpoint", step, stall_s=0.25, spent_s={"step": 1e-6 * step})
        if step == 250:
            ledger.append("resume", 200, attempt=2, repeated=50)
    ledger.append("done", 400)
    samples = [
        TextSample(original=["the", "chef", "</s>"], shown=["the", "dog", "##s"], replaced_probability=[0.1, 0.8, 0])
    ]
    writer.write_samples(400, samples)
    writer.close()
    ledger.close()
    corpus = {"rows": 10_000, "tokens": 1_270_000, "seq_len": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["my-secret-program"])
        write_environment(run, world_size=2, hosts=["my-secret-host", "other-host"], corpus=corpus)
    (run / "identity.json").write_text('{"corpus_fingerprint": "fedcba9876543210", "numerics": 1}')
    assert write_report(run) == run / "report.html"
    return run


def test_the_report_of_a_finished_run_shows_its_result_starts_saves_config_and_versions(run_dir: Path):
    config = load_config(run_dir / "config.yaml")
    vocab_size = config.model.vocab_size
    parameters = parameter_counts(config.model, config.objective)
    expected_texts = [
        "my run <b>",  # the name of the run, escaped in the page
        "finished: step 400 of 400",
        "0.9000",  # the last AUC
        "0.7667",  # the last context AUC
        "0.5 = chance (token frequency alone), 1 = perfect; standard error 0.0041",
        "2 starts",
        "50 steps repeated",
        "Where the time went: ",
        "4 checkpoints, the newest of step 400, each held the training up for 0.25 s (median).",
        "attempt 2, repeated 50",
        f"vocab_size: {vocab_size}",
        "deepspeed",
        "1.27M",  # tokens of the corpus
        "10,000 rows of 128, 1,270,000 tokens",
        "fedcba987654",
        f"{parameters.discriminator:,} parameters",
        "at 0.5 per kWh",
        "the dogs chef </s>",  # replaced tokens with their originals
    ]

    page = (run_dir / "report.html").read_text()

    text = parsed_page(page).text
    for expected_text in expected_texts:
        assert expected_text in text, expected_text
    assert page.count("<svg") == len(PANELS)
    assert len(page) < 400_000
    assert not (run_dir / "report.html.tmp").exists()


def test_eight_tiles_show_what_matters_and_a_table_shows_the_other_figures(run_dir: Path):
    """They are in the order of reading: what the run has learnt, how far it is, and how fast."""
    page = (run_dir / "report.html").read_text()

    tiles = re.findall(r'<div class="tile"><span class="name">(.*?)</span>', page)
    assert tiles == [
        "Context AUC, held out",
        "ROC-AUC, held out",
        "RTD loss, held out",
        "MLM loss, held out",
        "Replaced tokens found, held out",
        "Tokens seen",
        "Tokens per second",
        "Goodput",
    ]
    text = parsed_page(page).text
    assert "40.2 %" in text and "38.1 %" not in text  # the recall of the evaluation, not the accuracy in training
    further = text[text.index("Further figures") :]
    for name in ("RTD loss, training", "Original tokens kept", "Waiting for data", "Discriminator", "Energy"):
        assert name in further, name
    # replaced_fraction is 0.071: the entropy of that share is the loss of the best constant guess.
    assert "the same guess for every token reaches 0.256" in text


@pytest.mark.parametrize(
    ("step", "context_auc", "css_class", "text"),
    [
        (400, 0.503, "bad", "Warning: step 400: context AUC 0.503"),
        (
            400,
            0.61,
            "good",
            "The discriminator learns from context: context AUC 0.610 at step 400, where 0.5",
        ),
        (
            100,
            0.503,
            "open",
            "Too early to tell: context AUC 0.503 at step 100, where 0.5 is chance; it is",
        ),
    ],
)
def test_the_top_of_the_report_says_whether_the_run_learns_and_warns_as_status_does(
    tmp_path: Path,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
    step: int,
    context_auc: float,
    css_class: str,
    text: str,
):
    config = load_config(CONFIGS / "demo_cpu_bert.yaml", ["train.num_steps=400"])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    writer = MetricsWriter(tmp_path)
    writer.write(step_record(step=step))
    writer.write(eval_record(step=step, context_auc=context_auc, context_auc_se=0.004))
    writer.close()

    page = write_report(tmp_path).read_text()

    top = page[: page.index('class="tiles"')]
    assert f'<p class="verdict {css_class}">' in top
    assert text in parsed_page(page).text
    status = CliRunner().invoke(app, ["status", str(tmp_path)]).stdout
    assert ("warning" in status) == (css_class == "bad")


def test_only_replaced_words_of_a_text_are_tinted_and_words_stand_apart(run_dir: Path):
    page = (run_dir / "report.html").read_text()
    sample = page[page.index('class="card samples"') :].split("</div>")[0]

    assert re.findall(r"<span[^>]*>(.*?)</span>", sample) == ["the"]
    assert re.findall(r"<(\w+)[^>]*style=", sample) == ["u"]
    assert re.search(r'</span> <u title="replaced with probability 0.80".*>dogs</u> <s>chef &lt;/s&gt;</s>', sample)


def test_the_report_loads_nothing_from_another_file_or_server(run_dir: Path):
    """All addresses in the page are anchors within it, and it loads no script, style sheet or image."""
    page = (run_dir / "report.html").read_text()

    for name, value in parsed_page(page).attributes:
        if name in ("src", "href", "xlink:href", "data") and value:
            assert value.startswith("#")
    assert not re.findall(r"@import|url\((?!#)|<script[^>]*\ssrc|<link|<img|fetch\(|XMLHttpRequest", page)


def test_curves_scale_with_the_page_and_take_their_colors_from_its_css_variables(run_dir: Path):
    """Matplotlib draws with placeholder colors such as #010203, which must all be replaced."""
    placeholder_color = r"#0[1-4]0[1-4]0[1-9]"
    run = RunCurves(name="run", columns=columns_of(read_metrics(run_dir)), resumes=[200])

    for panel in PANELS:
        drawn = draw_panel(panel, [run])

        assert drawn is not None
        svg = drawn.svg
        root = ET.fromstring(svg)
        assert "width" not in root.attrib
        assert root.attrib["viewBox"]
        assert "var(--ink)" in svg
        assert "var(--series-1)" in svg or "var(--series-2)" in svg
        assert not re.findall(placeholder_color, svg)
        assert root.attrib["aria-label"] == drawn.title == panel.title


def test_the_report_can_be_passed_on(run_dir: Path):
    """environment.json has the hosts and the command line, and config.yaml a command that may hold a secret."""
    environment = (run_dir / "environment.json").read_text()
    page = (run_dir / "report.html").read_text()

    assert "my-secret-host" in environment and "my-secret-program" in environment
    assert "my-secret" not in page


def test_gpus_of_one_model_with_two_sizes_of_memory_are_counted_apart(run_dir: Path, tmp_path: Path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    environment = json.loads((run / "environment.json").read_text())
    sizes = {80: 3, 40: 1}
    devices = [{"name": "A100", "memory_gb": size} for size, number in sizes.items() for _ in range(number)]
    environment["gpus"] = {"driver": "570", "devices": devices}
    (run / "environment.json").write_text(json.dumps(environment))

    page = write_report(run).read_text()

    assert "3 x A100, 80 GB" in page and "1 x A100, 40 GB" in page


def test_the_report_shows_the_commit_of_the_code(run_dir: Path):
    code = commit()
    if code is None:
        pytest.skip("the source code is in no git work tree, so there is no commit to show")

    assert code["sha"][:12] in (run_dir / "report.html").read_text()


def hover_data(page: str) -> list[dict[str, Any]]:
    """Return the values that each diagram of a page shows under the pointer."""
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def test_values_under_the_pointer_are_those_of_the_records_at_their_place_in_the_diagram(run_dir: Path):
    """The place is checked against the line that is drawn: its last point is that of the last evaluation."""
    records = read_metrics(run_dir)
    page = (run_dir / "report.html").read_text()
    by_label = {line["label"]: (data, line) for data in hover_data(page) for line in data["lines"]}

    data, line = by_label["context AUC"]
    expected = [(record.step, record.context_auc) for record in records if isinstance(record, EvalRecord)]
    assert line["steps"] == [step for step, _value in expected]
    assert line["values"] == pytest.approx([value for _step, value in expected], rel=1e-4)
    _data, raw = by_label["global norm"]
    assert raw["values"] == [0.8531] * 40

    left, right, first, last = data["x"]
    bottom, top, low, high = data["y"]
    step, value = expected[-1]
    x = left + (step - first) / (last - first) * (right - left)
    y = bottom + (value - low) / (high - low) * (top - bottom)
    panel = next(panel for panel in PANELS if panel.name == "context_auc")
    drawn = draw_panel(panel, [RunCurves(name="run", columns=columns_of(records))])
    assert drawn is not None
    (path,) = re.findall(
        r'<g id="line2d_\d+">\s*<path d="([^"]*)"[^>]*clip-path[^>]*stroke: var\(--series-2\)', drawn.svg
    )
    *_, drawn_x, drawn_y = map(float, re.findall(r"-?[\d.]+", path))
    assert (drawn_x, drawn_y) == pytest.approx((x, y), abs=0.01)


def test_baselines_are_what_guesses_reach_on_random_labels():
    """Against a simulation: guesses that know nothing of the token, on labels drawn at random."""
    rng = np.random.default_rng(0)
    is_replaced = rng.random(400_000) < 0.2
    called_replaced = rng.random(400_000) < np.where(is_replaced, 0.7, 0.1)  # a discriminator that knows something
    fields = {
        "replaced_fraction": is_replaced.mean(),
        "replaced_accuracy": called_replaced[is_replaced].mean(),
        "original_accuracy": 1 - called_replaced[~is_replaced].mean(),
    }
    record = STEP.model_copy(update=fields)
    guess = rng.permutation(called_replaced)  # as many tokens are called replaced, at random
    losses = [-np.log(np.where(is_replaced, p, 1 - p)).mean() for p in np.arange(0.1, 0.3, 0.001)]

    guesses = baselines(record)

    assert guesses["guessed_replaced"] == pytest.approx(guess[is_replaced].mean(), abs=0.005)
    assert guesses["constant_guess_loss"] == pytest.approx(min(losses), abs=1e-4)
    evaluation = EVAL.model_copy(
        update={
            "accuracy": (is_replaced == called_replaced).mean(),
            "precision": is_replaced[called_replaced].mean(),
            "recall": called_replaced[is_replaced].mean(),
        }
    )
    assert guessed_by_recall(evaluation) == pytest.approx(called_replaced.mean(), abs=1e-9)
    assert np.isnan(guessed_by_recall(EVAL.model_copy(update={"precision": 0.0, "recall": 0.0})))
    without_replaced = baselines(record.model_copy(update={"replaced_fraction": 0.0}))
    assert np.isnan(without_replaced["guessed_replaced"])


def test_the_diagram_of_the_context_auc_has_a_line_at_one_half(run_dir: Path):
    panel = next(panel for panel in PANELS if panel.name == "context_auc")

    drawn = draw_panel(panel, [RunCurves(name="run", columns=columns_of(read_metrics(run_dir)))])

    assert panel.chance == 0.5
    assert drawn is not None
    assert "0.5: a guess" in drawn.svg


def test_the_page_of_a_long_run_stays_small(tmp_path: Path, step_record: Callable[..., StepRecord]):
    """All its curves have the largest number of points that is drawn."""
    rng = np.random.default_rng(0)
    writer = MetricsWriter(tmp_path)
    for step in range(10, 30_001, 10):
        values = rng.random(4)
        writer.write(step_record(step=step, mlm_loss=values[0], rtd_loss=values[1], grad_norm=values[2], lr=values[3]))
    writer.close()

    page = write_report(tmp_path).read_text()

    assert len(page) < 1_500_000


def test_a_report_is_written_for_a_run_without_a_step_and_for_one_with_undefined_values_only(
    tmp_path: Path, step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    Ledger(tmp_path).close()
    page_without_steps = write_report(tmp_path).read_text()
    assert "There is no record of a step" in page_without_steps

    nan = float("nan")
    inf = float("inf")
    writer = MetricsWriter(tmp_path)
    writer.write(step_record(mlm_loss=nan, rtd_loss=nan, replaced_accuracy=nan, grad_norm=inf, mfu=None))
    writer.write(eval_record(auc=nan))
    writer.close()
    page = write_report(tmp_path).read_text()
    parsed_page(page)
    assert "MFU" not in page
    write_curves_png(tmp_path, tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("replaced_fraction", "token_loss", "titles"),
    [
        (0.0, 0.0, ["MLM loss (nats per masked token)", "Learning rate"]),  # as objective mlm records
        (
            0.1,
            2.5,  # as replace_mlm
            [
                "MLM loss (nats per masked token)",
                "Loss of the tokens that the discriminator predicts (nats per token)",
                "Learning rate",
            ],
        ),
    ],
)
def test_the_report_shows_nothing_of_a_detection_that_the_objective_does_not_have(
    tmp_path: Path,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
    replaced_fraction: float,
    token_loss: float,
    titles: list[str],
):
    nan = float("nan")
    lacking = {"rtd_loss": 0.0, "token_loss": token_loss}
    writer = MetricsWriter(tmp_path)
    writer.write(
        step_record(
            step=5, replaced_accuracy=nan, original_accuracy=nan, replaced_fraction=replaced_fraction, **lacking
        )
    )
    writer.write(eval_record(step=5, auc=nan, accuracy=nan, precision=nan, recall=nan, **lacking))
    writer.close()

    text = write_report(tmp_path).read_text()

    shown = parsed_page(text).text
    assert "nan" not in shown
    assert "RTD loss" not in shown
    assert "AUC" not in shown
    assert ("Token loss, held out" in shown) == bool(token_loss)
    assert re.findall("<h3>(.*?)</h3>", text)[: len(titles)] == titles
    head, row = re.findall(r"<tr>(.*?)</tr>", text[text.index("Held-out evaluations") :])[:2]
    expected = (
        ["step", "token loss", "MLM loss", "right", "rows"] if token_loss else ["step", "MLM loss", "right", "rows"]
    )
    assert re.findall(r"<th[^>]*>(.*?)</th>", head) == expected
    assert len(re.findall(r"<td[^>]*>(.*?)</td>", row)) == len(expected)


@pytest.mark.parametrize(
    ("last_event", "text"), [("stop", "stopped on purpose after step 30"), ("crash", "crashed after")]
)
def test_the_report_shows_whether_a_run_was_stopped_or_crashed(tmp_path: Path, last_event: Event, text: str):
    ledger = Ledger(tmp_path)
    ledger.append("start", 0)
    ledger.append(last_event, 30)
    ledger.close()

    page = write_report(tmp_path).read_text()

    assert text in parsed_page(page).text


def test_a_report_of_a_missing_run_folder_is_a_user_error(tmp_path: Path):
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "typo")
    with pytest.raises(UserError, match="not a run folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_at_the_end_of_a_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "metrics.jsonl").write_text("damaged\n")

    _write_report(tmp_path)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("report.html was not written (UserError: ")
    assert line.endswith(f"the run is not affected; try again with `electra-dist report {tmp_path}`")


def test_the_picture_of_the_curves_is_a_png_of_1500_by_900_pixels(run_dir: Path, tmp_path: Path):
    """A PNG begins with a signature of 8 bytes; bytes 16 to 23 are its width and height, big-endian."""
    data = write_curves_png(run_dir, tmp_path / "curves.png").read_bytes()

    signature = data[:8]
    width = int.from_bytes(data[16:20], "big")
    height = int.from_bytes(data[20:24], "big")
    assert signature == b"\x89PNG\r\n\x1a\n"
    assert width == 1500
    assert height == 900


@settings(max_examples=50, deadline=None)
@example([1.0] * 30 + [-9.0] + [1.0] * 30, 2)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 40))
def test_a_thinned_curve_has_points_of_the_curve_in_order_with_its_ends_and_extremes(
    values: list[float], num_buckets: int
):
    step_distance = 10
    steps = np.arange(len(values), dtype=float) * step_distance

    thin_steps, thin_values = Curve(steps, np.array(values)).thinned(num_buckets)

    assert len(thin_values) <= 2 * num_buckets + 2
    assert list(thin_steps) == sorted(set(thin_steps))
    values_at_thin_steps = [values[int(step) // step_distance] for step in thin_steps]
    assert list(thin_values) == values_at_thin_steps
    assert thin_steps[0] == steps[0]
    assert thin_steps[-1] == steps[-1]
    assert thin_values.min() == min(values)
    assert thin_values.max() == max(values)


def test_a_long_curve_is_averaged_before_it_is_smoothed():
    steps = np.arange(24_000.0)

    smooth_steps, smooth_values = Curve(steps, 5 + 0 * steps).smoothed()

    assert len(smooth_steps) == len(smooth_values) == 2400
    assert smooth_steps[:2] == pytest.approx([4.5, 14.5])
    assert smooth_values == pytest.approx(np.full(2400, 5.0))


def test_smoothing_leaves_a_constant_as_it_is_and_does_not_lag_behind_a_line():
    constant = np.full(50, 3.0)
    line = np.arange(1001.0)

    assert Curve(line[:50], constant).smoothed().values == pytest.approx(constant)
    assert Curve(line, line).smoothed().values[500] == pytest.approx(500, abs=1e-3)
