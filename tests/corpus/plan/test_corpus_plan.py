"""Plans of corpus builds: the requests of a real build, scaling, machines, prices, and the command."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.client
import pytest
from electra_launcher.cli.main import corpus_app as app
from support.corpus_texts import make_prose, make_vocabulary
from support.s3_fixtures import bucket
from support.s3_fixtures import moto as s3
from support.s3_server import S3Server
from typer.testing import CliRunner

from electra_dist.config import CorpusConfig
from electra_dist.corpus.builder.build_corpus import WHOLE, build_part
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.join_parts import join_parts
from electra_dist.corpus.inputs.find_inputs import search_inputs
from electra_dist.corpus.plan import corpus_rates, measurement
from electra_dist.corpus.plan.corpus_plan import Prices, Workload, machines_needed, plan_corpus
from electra_dist.corpus.plan.corpus_rates import STEPS, CorpusRates, PrepareRate, measure_rates, read_rates
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store

CONFIG = Path(__file__).parents[3] / "configs" / "large_25pct_mask.yaml"
KINDS = {
    "GetObject": "get",
    "PutObject": "put",
    "ListObjectsV2": "list",
    "DeleteObject": "delete",
    "DeleteObjects": "delete",
}
_SINGLE_REQUESTS = 4  # for small files of which a build has one, and which a plan may leave out
__all__ = ["bucket", "s3"]


def make_rates(**fields: Any) -> CorpusRates:
    """Return measured rates: 1 MB of text has 250,000 tokens, and each step of the build took one second."""
    tree = {
        "sample": "a text",
        "date": "2026-11-20T10:00:00+00:00",
        "hardware": "a machine",
        "settings": {"seq_len": 512},
        "input_bytes": 400_000,
        "text_bytes": 1_000_000,
        "documents": 500,
        "spill_bytes": 450_000,
        "tokens": 250_000,
        "shard_bytes": 502_000,
        "cpu_s": dict.fromkeys(STEPS, 0.1),
        "record_cpu_s": 0.0001,
    }
    return CorpusRates.model_validate({**tree, **fields})


def make_request(inputs: Any = (), **fields: Any) -> BuildRequest:
    """Return the settings of a build: the default sizes of shards, unless `fields` overrides them."""
    return BuildRequest(
        inputs=inputs,
        vocabulary=make_vocabulary(),
        output="unused",
        seq_len=64,
        seed=1,
        corpus=CorpusConfig.model_validate({"heldout_fraction": 0.0, **fields}),
    )


def make_work(text_bytes: float, **fields: Any) -> Workload:
    """Return a workload of files, each of 100 MB of text compressed to 40 MB."""
    values: dict[str, Any] = {
        "text_bytes": text_bytes,
        "input_bytes": 0.4 * text_bytes,
        "num_files": max(1, round(text_bytes / 1e8)),
        "num_documents": text_bytes / 2000,
        "raw_text_bytes": text_bytes,
    }
    return Workload(**{**values, **fields})


def test_a_plan_names_the_requests_that_a_build_sends(
    bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan agrees with a build on S3 that has several files per group, several buckets and held-out rows."""
    source = open_store(f"{bucket}/in", s3.endpoint_url)
    for number in range(8):
        lines = [json.dumps({"text": text}) + "\n" for text in make_prose(40, number)]
        source.write(f"{number}.jsonl", "".join(lines).encode())
    sent: Counter[str] = Counter()
    send = botocore.client.BaseClient._make_api_call

    def count_and_send(client: Any, operation: str, arguments: Any) -> Any:
        """Count the request and send it."""
        sent[KINDS[operation]] += 1
        return send(client, operation, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(botocore.client.BaseClient, "_make_api_call", count_and_send)
        files = search_inputs([f"{bucket}/in"], s3.endpoint_url).files
        small = make_request(files, shard_size_mb=0.02, heldout_fraction=0.2)
        request = dataclasses.replace(small, output=f"{bucket}/out", endpoint_url=s3.endpoint_url)
        build_part(request, WHOLE)
        manifest = join_parts(request.output, s3.endpoint_url).manifest

    rates = measure_rates(request, "a text", "a machine")
    assert rates.documents == manifest.totals["documents_in"]
    work = Workload(
        text_bytes=rates.text_bytes,
        input_bytes=sum(file.size for file in files),
        num_files=len(files),
        num_documents=rates.documents,
        raw_text_bytes=rates.text_bytes,
    )
    plan = plan_corpus(rates, request, work)
    planned = dataclasses.asdict(plan.whole.requests)
    assert plan.num_groups > 1 and plan.num_shards == len(manifest.shards) > 10
    for kind, number in planned.items():
        assert number == pytest.approx(sent[kind], rel=0.02, abs=_SINGLE_REQUESTS), kind
    assert planned.keys() == sent.keys()


def test_the_requests_of_a_terabyte_are_few_beside_the_readings_of_spill_files() -> None:
    """`pytest -s` prints them; `test_requests.py` bounds those of a real build for a further group or shard."""
    request = make_request()
    plan = plan_corpus(
        make_rates(), request, make_work(1e12, input_bytes=16_000 * request.group_bytes, num_files=16_000)
    )
    requests = plan.whole.requests
    print(f"\n{plan.num_groups:,} groups, {plan.num_spills:,} spill files, {plan.num_buckets:,} buckets, ", end="")
    print(f"{plan.num_shards:,} shards: {dataclasses.asdict(requests)}")
    assert plan.num_groups == 16_000
    readings = plan.num_spills * plan.num_buckets  # each bucket reads its part of each spill file, in parallel
    others = requests.total - readings
    assert 0 < others <= 5 * plan.num_groups + 4 * plan.num_spills + 3 * plan.num_shards


def test_ten_times_the_text_is_ten_times_the_work() -> None:
    rates = make_rates()
    plans = [plan_corpus(rates, make_request(), make_work(size)) for size in (14e9, 140e9)]
    small, large = plans
    assert large.tokens == pytest.approx(10 * small.tokens) == pytest.approx(35e9)
    for before, after in zip(small.parallel, large.parallel, strict=True):
        assert after.core_hours == pytest.approx(10 * before.core_hours)
        assert (after.bytes_in, after.bytes_out) == pytest.approx((10 * before.bytes_in, 10 * before.bytes_out))
    assert large.num_groups == 700  # two files of 40 MB each, because a group ends where it reaches 64 MB
    assert large.num_spills == 1400  # 200 MB of text in files of 128 MB
    assert large.num_buckets <= 1024 and large.num_shards * 16e6 == pytest.approx(140e9 * 0.502, rel=0.3)
    assert large.spill_bytes == pytest.approx(0.45 * 140e9)


def test_so_many_machines_as_the_plan_names_finish_in_the_wanted_time() -> None:
    rates = make_rates()
    plan = plan_corpus(rates, make_request(), make_work(140e9, cores_per_machine=4))
    for hours in (0.5, 1.0, 3.0):
        machines = machines_needed(plan, hours)
        assert machines is not None
        enough = plan_corpus(rates, make_request(), make_work(140e9, num_machines=machines, cores_per_machine=4))
        assert enough.hours <= hours
        if machines > 1:
            work = make_work(140e9, num_machines=machines - 1, cores_per_machine=4)
            assert plan_corpus(rates, make_request(), work).hours > hours
    assert machines_needed(plan, 1e-6) is None


def test_more_machines_divide_the_parallel_steps_and_not_the_merge() -> None:
    """The merge runs in one process, so it takes as many hours as core-hours on any number of machines."""
    for num_machines in (1, 10):
        work = make_work(140e9, num_machines=num_machines, cores_per_machine=4)
        plan = plan_corpus(make_rates(), make_request(), work)
        parallel_hours = sum(step.core_hours for step in plan.parallel) / (4 * num_machines)
        assert plan.merge.core_hours > 0
        assert plan.hours == pytest.approx(parallel_hours + plan.merge.core_hours, rel=1e-12)


def test_the_cost_is_that_of_hours_requests_and_bytes() -> None:
    plan = plan_corpus(make_rates(), make_request(), make_work(14e9))
    read = plan.parallel[0]
    assert read.cost(Prices()) == 0 and not Prices().any
    prices = Prices(core_hour=2.0, thousand_requests=3.0, gigabyte=5.0)
    expected = 2 * read.core_hours + 3 * read.requests.total / 1000 + 5 * read.bytes_in / 1e9
    assert read.cost(prices) == pytest.approx(expected)


def test_filters_are_counted_for_all_text_and_deduplication_for_what_is_kept() -> None:
    stages = [
        PrepareRate(stage=name, cpu_s=36.0, text_bytes=1_000_000) for name in ("01-filter", "02-exact-signatures")
    ]
    work = make_work(1e9, raw_text_bytes=4e9)
    plan = plan_corpus(make_rates(prepare=stages), make_request(), work)
    assert [step.name for step in plan.prepare] == ["prepare: filter", "prepare: exact-signatures"]
    assert [step.core_hours for step in plan.prepare] == pytest.approx([40.0, 10.0])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the function `run(*options)`, which runs `corpus plan` in this process with its own cache and sample."""
    monkeypatch.setattr(measurement, "user_cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(corpus_rates, "SAMPLE_BYTES", 100_000)

    def invoke(*options: str) -> Any:
        return CliRunner().invoke(app, ["plan", str(CONFIG), *options], catch_exceptions=False)

    return invoke


def test_the_command_measures_once_and_plans_from_the_file_then(run: Callable[..., Any], tmp_path: Path) -> None:
    options = ["--set", "model.vocab_size=2000", "--json"]
    first = run(*options)
    (kept,) = (tmp_path / "cache").iterdir()
    again = run(*options)
    assert "measuring" in first.stderr and "measuring" not in again.stderr
    assert json.loads(first.stdout) == json.loads(again.stdout)
    tree = json.loads(first.stdout)
    assert tree["tokens"] == pytest.approx(33e9)
    assert tree["rates"]["cpu_s"].keys() == set(STEPS)
    assert min(tree["rates"]["cpu_s"].values()) > 0
    kept.write_text("{")
    assert "measured again" in run(*options).stderr
    other = run("--rates", str(kept), "--hours", "2", "--core-hour-price", "0.1", "--tokens", "66e9")
    assert "66.0B tokens" in other.stdout and "cost" in other.stdout and "for 2 h: " in other.stdout


def test_the_inputs_decide_the_tokens_of_the_plan(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in make_prose(60, number)]
        (tmp_path / "in" / f"{number}.jsonl").write_text("".join(lines))
    (tmp_path / "vocab.txt").write_text(make_vocabulary().text)
    options = ["--input", str(tmp_path / "in"), "--vocab", str(tmp_path / "vocab.txt"), "--json"]
    plan = json.loads(run(*options, "--set", "model.vocab_size=100").stdout)
    size = sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    assert plan["tokens"] == pytest.approx(plan["rates"]["tokens"] * size / plan["rates"]["input_bytes"])
    with_tokens = json.loads(run(*options, "--set", "model.vocab_size=100", "--tokens", "1e9").stdout)
    assert with_tokens["tokens"] == pytest.approx(1e9)


def test_documents_of_the_sample_without_text_are_left_out(run: Callable[..., Any], tmp_path: Path) -> None:
    """Without --vocab, a vocabulary is trained from the sample."""
    documents = [{"text": ""}, {"other": 1}, *({"text": text} for text in make_prose(60, 0))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    done = run("--input", str(tmp_path / "in.jsonl"), "--json", "--set", "model.vocab_size=300")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rates"]["documents"] > 0


def test_a_plan_of_a_preparation_names_the_package_that_is_missing(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prepare.yaml").write_text("output: o\nwork: w\nsources: [{name: a, path: a}]\n")
    monkeypatch.setitem(sys.modules, "datatrove.utils.logging", None)  # imports of it fail
    with pytest.raises(UserError, match=r"--prepare needs packages .*; run: pip install 'datatrove"):
        run("--prepare", str(tmp_path / "prepare.yaml"), "--set", "model.vocab_size=300")


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{}", "the value of `sample` is wrong"), ("[", "it is not JSON"), ('{"rates": {"sample": 3}}', "damaged")],
)
def test_a_file_without_rates_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(content)
    with pytest.raises(UserError, match=reason):
        read_rates(tmp_path / "rates.json")
