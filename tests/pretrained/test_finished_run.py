"""A real run on two ranks: what the command exports of it, and what the library reads of it.

They share one file, so that they share one run.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from electra_launcher.cli.main import app
from huggingface_hub import ModelCard
from support.folder_contents import file_contents
from support.real_runs import REPOSITORY, SEQ_LEN, quick_command, read_losses, write_corpus, write_tiny_config
from support.stored_weights import check_weights, checkpoint, damage, stored_weights
from transformers import AutoModel, AutoTokenizer, ElectraForMaskedLM, ElectraForPreTraining
from typer.testing import CliRunner

import electra_dist as ed
from electra_dist.checkpoint.manifest import Manifest
from electra_dist.checkpoint.stored_copies import OtherRun
from electra_dist.config.load import load_config
from electra_dist.corpus.build_report import SourceNotes, make_report, write_report
from electra_dist.corpus.counts import Counts
from electra_dist.data.manifest import read_manifest
from electra_dist.data.receipt import Receipt
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.model.attention import SdpaMask, attention_bias, derive
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.towers import build_towers
from electra_dist.objectives.base import Sums
from electra_dist.pretrained import export as export_module
from electra_dist.pretrained.encoder import load_pretrained
from electra_dist.pretrained.export import export_run
from electra_dist.pretrained.weights import check_vocabulary, load_source
from electra_dist.report.model_card import model_card
from electra_dist.run.folder import token_counts_file
from electra_dist.store.open_store import open_store
from electra_dist.train.token_counts import write_counts

pytestmark = pytest.mark.multiproc

STEPS = (5, 10, 15, 20)  # of the checkpoints of the run
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps on two ranks, with four checkpoints that were evaluated; tests do not change it."""
    folder = tmp_path_factory.mktemp("exported")
    write_corpus(str(folder / "corpus"), [70, 33, 48])
    write_corpus(str(folder / "corpus" / "heldout"), [24], seed=9)
    sources = {"/data/texts/wiki": {"tokens": 3000}, "/data/texts/web": {"tokens": 1000}}
    counts = Counts.model_validate({"sources": sources})
    notes = SourceNotes(licences={"/data/texts/wiki": "cc-by-sa-4.0"})
    write_report(open_store(str(folder / "corpus")), make_report(counts, "skip", notes))
    settings = {"log.eval_every_steps": 5, "checkpoint.keep_last": 10}
    config = write_tiny_config(folder / "run.yaml", folder / "run", str(folder / "corpus"), **settings)
    done = subprocess.run(quick_command(config, 2), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(read_losses(folder / "run")) == 20
    return folder / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may damage."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def export(run: Path, *options: str, exit_code: int = 0) -> str:
    """Run `electra-dist export` in this process, check its exit code, and return its output."""
    result = CliRunner().invoke(app, ["export", str(run), *options])
    if isinstance(result.exception, UserError):
        assert exit_code == 78, result.exception
        message = str(result.exception)
        assert "\n" not in message
        return message
    assert result.exit_code == exit_code, result.output
    return result.output


def test_exported_model_is_the_trained_one(run: Path, tmp_path: Path) -> None:
    export(run, "--output", str(tmp_path))

    weights = stored_weights(run, 20)
    for tower in ("discriminator", "generator"):
        check_weights(tmp_path, tower, weights)
    config = load_config(run / "config.yaml")
    initial = build_towers(config.model, config.seed, config.objective)
    assert not torch.equal(initial.embeddings.word.weight, weights["embeddings.word.weight"])  # it was trained

    # What transformers computes with the folders is what our towers compute with the weights of the checkpoint.
    towers = initial.eval()
    towers.load_state_dict(weights)
    ids = torch.tensor([[2, 10, 11, 4, 12, 3], [2, 20, 4, 21, 22, 3]])
    layout = derive(ids, SPECIAL)
    mask = SdpaMask(attention_bias(layout, torch.float32))
    with torch.no_grad():
        embedded = towers.embeddings(ids, layout)
        large = towers.discriminator(embedded, mask, DropoutKeys.off(ids))
        small = towers.generator(embedded, mask, DropoutKeys.off(ids))
        table = towers.embeddings.word.weight[:300]
        token_logits = towers.generator_head.transform(small) @ table.T + towers.generator_head.bias
        replaced_logits = towers.discriminator_head.logits(large).view(ids.shape)
        hf_encoder = AutoModel.from_pretrained(tmp_path / "discriminator").eval()
        hf_discriminator = ElectraForPreTraining.from_pretrained(tmp_path / "discriminator").eval()
        hf_generator = ElectraForMaskedLM.from_pretrained(tmp_path / "generator").eval()
        torch.testing.assert_close(hf_encoder(ids).last_hidden_state, large, atol=1e-5, rtol=0)
        torch.testing.assert_close(hf_discriminator(ids).logits, replaced_logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(hf_generator(ids).logits, token_logits, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "discriminator")("w1 w2")["input_ids"] == [2, 6, 7, 3]


def test_a_step_or_the_best_checkpoint_is_exported_if_it_is_asked_for(run: Path, tmp_path: Path) -> None:
    export(run, "--checkpoint", "10", "--output", str(tmp_path / "ten"))
    check_weights(tmp_path / "ten", "discriminator", stored_weights(run, 10))

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    context_auc = {record["step"]: record["context_auc"] for record in records if record["kind"] == "eval"}
    assert tuple(context_auc) == STEPS
    best = max(STEPS, key=lambda step: context_auc[step])
    export(run, "--checkpoint", "best", "--output", str(tmp_path / "best"))
    check_weights(tmp_path / "best", "discriminator", stored_weights(run, best))
    record = json.loads((tmp_path / "best" / "generator" / "pretraining.json").read_text())
    assert record["steps"] == [best]
    assert record["rows"] == 16 * best
    assert record["seq_len"] == SEQ_LEN


def test_many_checkpoints_are_exported_as_revisions_and_the_printed_lines_upload_each_one(
    run: Path, tmp_path: Path
) -> None:
    output = export(run, "--layout", "revisions", "--output", str(tmp_path / "models"))

    assert sorted(file.name for file in (tmp_path / "models").iterdir()) == ["step10", "step15", "step20", "step5"]
    for step in STEPS:
        folder = tmp_path / "models" / f"step{step}"
        check_weights(folder, "discriminator", stored_weights(run, step))
        expected = stored_weights(run, step)["embeddings.word.weight"]
        table = AutoModel.from_pretrained(folder / "discriminator").get_input_embeddings().weight
        assert torch.equal(table, expected[: len(table)])
        card = ModelCard.load(folder / "discriminator" / "README.md")
        assert f"the weights after {step} of 20 steps" in card.text

    # The three lines, with a program `hf` that notes what it is asked for.
    (tmp_path / "hf").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "hf").chmod(0o755)
    lines = [line for line in output.splitlines() if line.lstrip().startswith(("hf ", "for "))]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", "\n".join(lines)], check=True, env=environment, timeout=60)
    asked = (tmp_path / "asked").read_text().splitlines()
    uploads = [f"upload YOUR-NAME/YOUR-MODEL {tmp_path}/models/step{step}/discriminator ." for step in STEPS]
    revisions = [f"{upload} --revision step{step}" for upload, step in zip(uploads, STEPS, strict=True)]
    assert asked == ["auth login", *revisions, uploads[-1]]


def test_revisions_may_be_chosen_and_named_by_tokens(run: Path, copy: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens = {record["step"]: record["tokens_seen"] for record in records if record["kind"] == "train"}
    by_tokens = ("--layout", "revisions", "--name-by", "tokens")
    export(run, *by_tokens, "--checkpoint", "20,10", "--output", str(tmp_path / "chosen"))
    assert {folder.name for folder in (tmp_path / "chosen").iterdir()} == {
        f"chck_{tokens[step] / 1000:.3g}k" for step in (10, 20)
    }

    damage(copy, 15)
    result = CliRunner().invoke(app, ["export", str(copy), "--checkpoint", "all", "--layout", "revisions"])
    assert result.exit_code == 0
    assert "step 15 is left out: " in result.stderr and "is damaged" in result.stderr
    left = {folder.name for folder in (copy / "export" / "revisions").iterdir()}
    assert left == {"step5", "step10", "step20"}
    revisions = ("--layout", "revisions", "--output", str(tmp_path / "none"))
    assert "is damaged" in export(copy, *revisions, "--checkpoint", "5,15", exit_code=78)
    assert "no checkpoint of step 7; choose among 5, 10" in export(run, *revisions, "--checkpoint", "7", exit_code=78)
    for steps in ("best", "1,000", "5,", "5-10"):
        assert "not a list of checkpoints" in export(run, *revisions, "--checkpoint", steps, exit_code=78)
    assert "add --layout revisions" in export(run, "--checkpoint", "all", exit_code=78)
    assert "add --layout revisions" in export(run, "--name-by", "tokens", exit_code=78)
    assert "leave out --average" in export(run, *revisions, "--average", "last:2", exit_code=78)


@pytest.mark.parametrize(
    ("options", "steps"), [(("last:3",), (10, 15, 20)), (("last:2", "--checkpoint", "15"), (10, 15))]
)
def test_the_mean_of_the_last_checkpoints_is_exported(
    run: Path, tmp_path: Path, options: tuple[str, ...], steps: tuple[int, ...]
) -> None:
    output = export(run, "--average", *options, "--output", str(tmp_path))

    stored = [stored_weights(run, step) for step in steps]
    mean = {name: (sum(weights[name].double() for weights in stored) / len(steps)).float() for name in stored[0]}
    for tower in ("discriminator", "generator"):
        check_weights(tmp_path, tower, mean)
    assert f"mean of the steps {', '.join(map(str, steps))}" in output
    assert (
        f"the mean of the weights after {', '.join(map(str, steps))} of 20 steps"
        in (tmp_path / "discriminator" / "README.md").read_text()
    )


def test_damaged_checkpoints_are_named_and_do_not_count(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copy, 15)

    calls: list[tuple[int, int]] = []
    exported = export_run(copy, tmp_path / "mean", num_averaged=2, progress=lambda *call: calls.append(call))
    assert exported.steps == (10, 20)
    assert calls == [(0, 2), (1, 2), (2, 2)]
    assert "step-00000015" in capsys.readouterr().err
    assert "is damaged" in export(copy, "--checkpoint", "15", exit_code=78)
    assert "ask for a mean of 3" in export(copy, "--average", "last:4", exit_code=78)
    assert export_run(copy, tmp_path / "newest").steps == (20,)
    damage(copy, 20)
    assert export_run(copy, tmp_path / "older").steps == (10,)
    named = capsys.readouterr().err.splitlines()
    assert [("step-00000020" in line, "step-00000015" in line) for line in named[-3:-1]] == [
        (True, False),
        (False, True),
    ]
    assert named[-1] == "exporting the checkpoint of step 10 instead"


def test_verify_reads_the_token_counts_of_a_run(copy: Path) -> None:
    def verify() -> str:
        return CliRunner().invoke(app, ["verify", "--bytes", str(copy)]).output.replace("\n", "")

    file = token_counts_file(copy, "0" * 64)
    write_counts(file, np.arange(300))
    assert "1 token counts file" in verify() and file.name not in verify()
    data = bytearray(file.read_bytes())
    data[-300] ^= 1
    file.write_bytes(bytes(data))
    assert file.name in verify()


@pytest.mark.parametrize("name", ["discriminator/model.safetensors", "generator/README.md", "generator/vocab.txt"])
def test_an_export_does_not_replace_a_model_of_others(run: Path, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "out" / name
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"is not of an export, .*--output") as error:
        export_run(run, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [mine]
    assert mine.read_bytes() == b"mine"


def test_an_export_that_was_killed_is_replaced_by_the_next_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export_run(run, tmp_path / "whole").folders["generator"]
    write = export_module.export_tower

    def write_discriminator_only(state: Any, model: Any, tower: str, *rest: Any) -> None:
        if tower == "generator":  # the folder of the discriminator is complete by then
            raise TypeError("killed")
        write(state, model, "discriminator", *rest)

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "export_tower", write_discriminator_only)
        with pytest.raises(TypeError):
            export_run(run, tmp_path / "out")
    again = export_run(run, tmp_path / "out").folders["generator"]
    assert file_contents(again) == file_contents(whole)


def test_the_next_best_checkpoint_is_exported_if_the_best_is_damaged(run: Path, copy: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    context_auc = {record["step"]: record["context_auc"] for record in records if record["kind"] == "eval"}
    best, second, *_ = sorted(STEPS, key=lambda step: -context_auc[step])
    damage(copy, best)

    assert export_run(copy, tmp_path, "best").steps == (second,)


@pytest.mark.parametrize("exchanged", ["config", "corpus", "checkpoints"])
def test_checkpoints_of_another_run_are_refused_by_whatever_reads_the_folder(
    copy: Path, tmp_path: Path, exchanged: str
) -> None:
    """The checkpoints of the folder are good, but the folder is that of a run with another config or corpus."""
    config = load_config(copy / "config.yaml")
    if exchanged == "config":
        change(copy / "config.yaml", b"seed: 7", b"seed: 8")
    elif exchanged == "corpus":
        change(copy / "identity.json", b'"corpus_fingerprint":"', b'"corpus_fingerprint":"0')
    else:  # those of one step only, by a run that differs in its learning rate
        manifest = checkpoint(copy, 15) / "manifest.json"
        parsed = Manifest.parse(manifest.read_bytes())
        state = parsed.state.model_copy(update={"identity_sha256": "1" * 64})
        manifest.write_bytes(parsed.model_copy(update={"state": state}).dump())
    towers = build_towers(config.model, 1, config.objective)
    train = config.train.model_copy(update={"init_from": str(copy)})
    step = "15" if exchanged == "checkpoints" else "20"
    out = ("--output", str(tmp_path / "out"))
    for command in (
        ["export", str(copy), "--checkpoint", step, *out],
        ["export", str(copy), "--average", "last:2", *out],
        ["verify", str(copy)],
        ["checkpoint", "verify", str(copy)],
        ["report", str(copy)],
    ):
        refused = CliRunner().invoke(app, command)
        assert isinstance(refused.exception, OtherRun), (command, refused.output)
        assert "\n" not in str(refused.exception)
    for read in (lambda: ed.load(copy, step=int(step)), lambda: load_pretrained(str(copy), step=int(step))):
        with pytest.raises(OtherRun):
            read()
    if exchanged != "checkpoints":
        with pytest.raises(OtherRun):
            load_source(towers, train)
    if exchanged != "corpus":  # there the corpus of the folder is what is named as changed
        refused = CliRunner().invoke(app, ["verify", "--bytes", str(copy)])
        assert isinstance(refused.exception, UserError) and "a run with another config" in refused.output
    assert not (tmp_path / "out").exists()


def test_the_card_has_the_facts_of_the_run_and_its_lines_load_the_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run, "--output", str(tmp_path), "--license", "apache-2.0")

    for tower, model_class in (("discriminator", "ElectraForPreTraining"), ("generator", "ElectraForMaskedLM")):
        card = ModelCard.load(tmp_path / tower / "README.md")
        assert card.data.license == "apache-2.0"
        assert f"# {run.parent.name}: ELECTRA {tower}" in card.text  # "run" alone says nothing
        assert card.data.library_name == "transformers"
        corpus = read_manifest(open_store(load_config(run / "config.yaml").data.corpus))
        assert f"`{corpus.fingerprint}`" in card.text
        tokens = round(320 * corpus.num_tokens / corpus.num_rows)
        assert f"| tokens | {tokens / 1000:.2f}k" in card.text
        assert "20 of 20, 16 rows each" in card.text
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last_evaluation = [record for record in records if record["kind"] == "eval"][-1]
        assert f"| {last_evaluation['auc']:.4f} |" in card.text
        assert (tmp_path / tower / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert "(curves.png)" in card.text
        assert "| web | 25.0 % | not stated |\n| wiki | 75.0 % | cc-by-sa-4.0 |" in card.text
        for secret in (str(run.parent), "/data/texts", os.uname().nodename):
            assert secret not in card.text
        [code] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
        assert len(code.splitlines()) == 3
        monkeypatch.chdir(tmp_path / tower)
        names: dict[str, object] = {}
        exec(code, names)
        assert type(names["model"]).__name__ == model_class


def test_the_python_lines_of_the_readme_embed_each_text_as_it_would_be_alone(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    folder = tmp_path / "discriminator"
    names: dict[str, Any] = {}
    exec(code.replace("runs/demo_cpu/export/discriminator", str(folder)), names)
    assert len(names["texts"]) == len(names["embeddings"]) == 2
    for text, embedding in zip(names["texts"], names["embeddings"]):
        tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
        alone = names["model"](**tokens).last_hidden_state.mean(dim=1)
        torch.testing.assert_close(embedding, alone[0])


def test_the_card_counts_the_flops_of_the_steps_that_were_made(run: Path, tmp_path: Path) -> None:
    """20 steps cost twice as much as 10."""
    flops = []
    for step in (10, 20):
        card = model_card("discriminator", "run", export_run(run, tmp_path, step), [], {}, "unknown")
        [figure] = re.findall(r"\| training FLOPs \| ([\d.e+]+),", card)
        flops.append(float(figure))
        assert f"{step} of 20, 16 rows each" in card
        assert "license: unknown" in card
        assert "The model was not evaluated." in card  # without records of evaluations
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.01)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_exported_files_are_readable_by_others_unless_the_umask_forbids_it(
    run: Path, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        export(run, "--output", str(tmp_path / "out"))
    finally:
        os.umask(before)

    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert len(files) == 2 * 8
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}


def test_a_folder_that_cannot_be_written_and_wrong_options_are_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    message = export(run, "--output", str(tmp_path / "file" / "models"), exit_code=78)
    assert message.startswith(f"{tmp_path}/file/models: {tmp_path}/file is not a writable folder")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # as for a user who is not root
        with pytest.raises(UserError, match="is not a writable folder"):
            export_run(run, tmp_path / "models")

    out = ("--output", str(tmp_path / "models"))
    assert "there is none of step 7" in export(run, *out, "--checkpoint", "7", exit_code=78)
    assert "--checkpoint last: not a checkpoint" in export(run, *out, "--checkpoint", "last", exit_code=78)
    for average in ("5", "last:0", "last:", "first:2"):
        assert "give last:N" in export(run, *out, "--average", average, exit_code=78)
    assert "not a licence identifier" in export(run, *out, "--license", "a: b", exit_code=78)
    assert not (tmp_path / "models").exists()


def test_a_run_without_evaluations_has_no_best_checkpoint(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in STEPS:
        manifest_file = checkpoint(copy, step) / "manifest.json"
        manifest_file.write_text("{}")  # a damaged manifest has no evaluation
    assert "none was saved at a step with an evaluation" in export(
        copy, "--checkpoint", "best", "--output", str(tmp_path / "out"), exit_code=78
    )


def test_the_library_reads_the_rows_that_the_run_has_trained_on(run: Path) -> None:
    """The independent truth are the receipts of the run, and the corpus as its shards' tar files hold it."""
    number_of_row = {}
    for row in rows_in_shards(load_config(run / "config.yaml").data.corpus):
        number_of_row[row.tobytes()] = len(number_of_row)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    receipts = {record["step"]: record["receipt"] for record in records if record["kind"] == "train"}

    total = Receipt()
    with ed.open_corpus(run) as corpus:
        assert corpus.fingerprint == json.loads((run / "identity.json").read_text())["corpus_fingerprint"]
        in_order = corpus.batches(global_batch=16, first_step=0)
        for step in range(20):
            ids = corpus.batch(step=step, global_batch=16)
            assert ids.dtype == torch.int64
            assert ids.shape == (16, SEQ_LEN)
            numbers = [number_of_row[row.astype(np.uint16).tobytes()] for row in ids.numpy()]
            assert corpus.row_ids(step, 16).tolist() == numbers
            total += Receipt.of(np.array(numbers))
            assert total.hex == receipts[step + 1]
            assert torch.equal(next(in_order), ids)
        in_order.close()  # type: ignore[attr-defined]
        assert torch.equal(corpus.batch(3, 16), ed.open_corpus(load_config(run / "config.yaml")).batch(3, 16))
    with ed.open_corpus(load_config(run / "config.yaml").data.corpus, seed=7, shuffle_window_shards=2) as by_url:
        assert torch.equal(by_url.batch(3, 16), ids_of_step(run, 3))
    with ed.open_corpus(load_config(run / "config.yaml").data.corpus) as other_order:  # the default seed, 42
        assert not torch.equal(other_order.batch(3, 16), ids_of_step(run, 3))


def rows_in_shards(corpus: str) -> Iterator[np.ndarray]:
    """Yield the rows of a corpus in the order of its shards, read from the tar files without the project's code."""
    for shard in sorted(Path(corpus).glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                yield from np.load(io.BytesIO(file.read()))


def ids_of_step(run: Path, step: int) -> torch.Tensor:
    """Return the rows of a step of the run."""
    with ed.open_corpus(run) as corpus:
        return corpus.batch(step, 16)


def test_the_library_computes_the_losses_of_the_run(run: Path) -> None:
    """The loss of a step, from the checkpoint before it and its rows, equals the one that the run has recorded."""
    config = ed.open_run(run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with ed.open_corpus(run) as corpus:
        objective = ed.build_objective(config, corpus)
        for step in (10, 15):
            assert ed.load_weights(objective, run, step) == step
            output = objective(ed.step_input(objective, corpus.batch(step, 16), step, config.seed))
            [record] = [record for record in records if record["kind"] == "train" and record["step"] == step + 1]
            sums = Sums(*output.sums.tolist())
            assert sums.mlm_loss_sum / sums.mlm_weight == pytest.approx(record["mlm_loss"], rel=1e-6)
            assert sums.rtd_loss_sum / sums.rtd_weight == pytest.approx(record["rtd_loss"], rel=1e-6)
            assert output.loss.item() == pytest.approx(record["loss"], rel=1e-6)

    towers = ed.build_towers(config)
    assert ed.load_weights(towers, run) == 20
    for name, weight in stored_weights(run, 20).items():
        assert torch.equal(towers.get_parameter(name), weight)
    other = config.model.model_copy(update={"embedding_size": 20})
    with pytest.raises(UserError, match="not those of the module"):
        ed.load_weights(ed.build_towers(config.model_copy(update={"model": other})), run)


def test_the_library_loads_the_towers_of_the_run_and_scores_text(run: Path, tmp_path: Path) -> None:
    model = ed.load(run, tower="discriminator", step=15)
    weights = stored_weights(run, 15)
    assert torch.equal(model.state["embeddings.word.weight"], weights["embeddings.word.weight"])

    export_run(run, tmp_path, 15)
    hf_model = ElectraForPreTraining.from_pretrained(tmp_path / "discriminator").eval()
    [tokens] = ed.replaced_probability(model, ["w1 w2 w3"])
    with torch.no_grad():
        expected = hf_model(torch.tensor([[2, 6, 7, 8, 3]])).logits[0, 1:-1].sigmoid()
    assert [token for token, _ in tokens] == ["w1", "w2", "w3"]
    assert [probability for _, probability in tokens] == pytest.approx(expected.tolist(), abs=1e-5)
    [text] = ed.score_texts(model, ["w1 w2 w3"])
    assert text.score == pytest.approx((1 - expected.double()).log().sum().item(), abs=1e-4)
    with pytest.raises(UserError, match="no probability"):
        ed.replaced_probability(ed.load(run, tower="generator"), ["w1"])


def test_a_corpus_that_has_changed_since_the_run_began_is_refused(copy: Path) -> None:
    identity = json.loads((copy / "identity.json").read_text())
    (copy / "identity.json").write_text(json.dumps({**identity, "corpus_fingerprint": "f" * 64}))
    with pytest.raises(ManifestMismatch, match="has changed since the run"):
        ed.open_corpus(copy)
    with (
        pytest.raises(ValueError, match="step is -1"),
        ed.open_corpus(load_config(copy / "config.yaml").data.corpus) as c,
    ):
        c.batch(-1, 16)


def test_the_library_reads_a_corpus_by_the_run_s_own_batch_and_the_best_checkpoint_and_the_curves(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = {record["step"]: record["context_auc"] for record in records if record["kind"] == "eval"}
    with ed.open_corpus(run) as corpus:
        assert torch.equal(corpus.batch(3), corpus.batch(3, 16))
        assert torch.equal(corpus.row_ids(3), corpus.row_ids(3, 16))
        assert torch.equal(next(corpus.batches(first_step=3)), corpus.batch(3, 16))
        assert repr(corpus) == f"Corpus({corpus.corpora.phases[0].url}: 151 rows of {SEQ_LEN} tokens)"
        url = corpus.corpora.phases[0].url
    with ed.open_corpus(url) as corpus, pytest.raises(UserError, match="pass global_batch"):
        corpus.batch(3)

    best = max(evaluations, key=lambda step: (evaluations[step], step))
    model = ed.load(run, step="best")
    assert f"at step {best}" in model.name
    assert torch.equal(model.state["embeddings.word.weight"], stored_weights(run, best)["embeddings.word.weight"])
    assert ed.load_weights(ed.build_towers(ed.open_run(run)), run, "best") == best
    with pytest.raises(ValueError, match="step is 'newest'"):
        ed.load(run, step="newest")  # type: ignore[arg-type]
    for value in (model, ed.open_run(run)):
        assert "\n" not in repr(value) and "layers of" in repr(value)

    assert ed.metrics(run)["step"] == list(range(1, 21))
    curves = ed.metrics(run, "eval")
    assert dict(zip(curves["step"], curves["context_auc"], strict=True)) == evaluations


@pytest.mark.parametrize(
    "script", ["score_text", "add_an_objective", "embed_sentences", "stream_batches", "read_curves"]
)
def test_examples_run_on_the_run(
    run: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """tests/examples/ runs the other scripts, which start processes."""
    arguments = {
        "score_text": [str(run), "w1 w2 w3", "w1"],
        "add_an_objective": [str(run / "config.yaml"), "--steps", "8"],
        "embed_sentences": [str(run), "w1 w2 w3", "w1", "w1 w2 w3"],
        "stream_batches": [str(run), "--steps", "3", "--first-step", "5"],
        "read_curves": [str(run), "--kind", "eval"],
    }
    monkeypatch.setattr(sys, "argv", [script, *arguments[script]])
    runpy.run_path(str(REPOSITORY / "examples" / f"{script}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    if script == "score_text":
        assert [line.split()[0::2] for line in lines[:2]] == [["w1", "w2", "w3"], ["w1"]]
        assert lines[2].startswith("best: w1 (-")  # fewer tokens have the higher sum
    elif script == "add_an_objective":
        losses = [float(line.split()[-1]) for line in lines]
        assert len(losses) == 8
        assert losses[-1] < losses[0]
    elif script == "embed_sentences":
        # Independent truth: transformers with the exported folder, one sentence at a time.
        export_run(run, tmp_path)
        model = AutoModel.from_pretrained(tmp_path / "discriminator").eval()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "discriminator")
        with torch.no_grad():
            states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state for text in ("w1 w2 w3", "w1")]
        cosine = torch.cosine_similarity(*(state[0].mean(0) for state in states), dim=0).item()
        assert lines[0] == f" 1.000 {cosine:6.3f}  1.000 w1 w2 w3"
    elif script == "stream_batches":
        assert [line.split(", ")[0] for line in lines] == [f"step {step}: 16 rows" for step in (6, 7, 8)]
    else:
        assert lines[0].split("\t") == ["step", "mlm_loss", "auc", "context_auc"]
        assert [line.split("\t")[0] for line in lines[1:]] == ["5", "10", "15", "20"]


def change(file: Path, old: bytes, new: bytes) -> str:
    """Replace a piece of a file, which stays readable, and return the path as the error must begin with it."""
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))
    return f"{file}: "


@pytest.mark.parametrize("reader", ["export", "load", "init_from"])
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("vocab.txt", b"\nw17\n", b"\nv17\n"),
        ("tokenizer.json", b'"lowercase": true', b'"lowercase": false'),
        ("tokenizer.json", b'"[MASK]": 4', b'"[MASK]": 5'),
    ],
)
def test_a_changed_file_of_the_tokenizer_in_a_run_folder_is_refused(
    copy: Path, tmp_path: Path, reader: str, name: str, old: bytes, new: bytes
) -> None:
    readers: dict[str, Callable[[], object]] = {
        "export": lambda: export_run(copy, tmp_path / "out"),
        "load": lambda: ed.load(copy),  # as for score, minimal-pairs, finetune and compare
        "init_from": lambda: check_vocabulary("train.init_from", copy, vocabulary),
    }
    vocabulary = load_pretrained(str(copy)).vocabulary
    place = change(copy / name, old, new)
    with pytest.raises(UserError) as caught:
        readers[reader]()
    assert str(caught.value).startswith(f"{place}its sha256 is ")
    assert "start the run once more" in str(caught.value)


def test_a_run_folder_without_digests_is_readable_and_checked_against_its_vocabulary(copy: Path) -> None:
    """Folders of older versions have no SHA256SUMS."""
    (copy / "SHA256SUMS").unlink(missing_ok=True)
    tokens = load_pretrained(str(copy)).vocabulary.tokens
    assert tokens == (copy / "vocab.txt").read_text().splitlines()
    place = change(copy / "tokenizer.json", b'"[MASK]": 4', b'"[MASK]": 5')
    with pytest.raises(UserError, match="its size or special ids are not those of") as caught:
        load_pretrained(str(copy))
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "tokenizer_config.json"])
def test_a_changed_file_of_the_tokenizer_in_an_export_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    folder = export_run(run, tmp_path).folders["discriminator"]
    vocabulary = load_pretrained(str(folder)).vocabulary
    old, new = (b"true", b"false") if name == "tokenizer_config.json" else (b"w17", b"v17")
    place = change(folder / name, old, new)
    with pytest.raises(
        UserError, match=r"its sha256 is .*pretraining\.json names .* export the model again"
    ) as caught:
        load_pretrained(str(folder))
    assert str(caught.value).startswith(place)
    with pytest.raises(UserError, match="its sha256 is"):
        check_vocabulary("train.init_from", folder, vocabulary)


def test_a_model_of_another_program_must_have_one_vocabulary_with_all_ids(run: Path, tmp_path: Path) -> None:
    """Nothing names its digests; tokenizer.json and vocab.txt are compared."""
    folder = export_run(run, tmp_path).folders["discriminator"]
    (folder / "pretraining.json").unlink()
    load_pretrained(str(folder))
    original = (folder / "tokenizer.json").read_bytes()
    change(folder / "tokenizer.json", b'"w17"', b'"v17"')
    with pytest.raises(UserError, match=r"vocab.txt: its tokens are not those of .*tokenizer\.json"):
        load_pretrained(str(folder))
    (folder / "tokenizer.json").write_bytes(original)
    change(folder / "tokenizer.json", b'"w294":299', b'"w294":300')
    with pytest.raises(UserError, match="the ids of its 300 tokens are not 0 to 299"):
        load_pretrained(str(folder))


def test_verify_bytes_reads_the_corpora_the_tokenizer_and_the_checkpoints_of_a_run(copy: Path) -> None:
    good = CliRunner().invoke(app, ["verify", "--bytes", str(copy)])
    assert good.exit_code == 0, good.output
    assert "2 corpus manifests" in good.stdout
    assert "4 shards, 4 checkpoints" in good.stdout
    assert "all good" in good.stdout
    damage(copy, 10)
    change(copy / "vocab.txt", b"\nw17\n", b"\nv17\n")
    change(copy / "identity.json", b'"corpus_fingerprint":"', b'"corpus_fingerprint":"0')
    bad = CliRunner().invoke(app, ["verify", "--bytes", str(copy)])
    assert isinstance(bad.exception, UserError)
    assert "3 of 13 files or checkpoints are bad" in str(bad.exception)
    lines = [line for line in bad.stdout.splitlines() if line.startswith("BAD: ")]
    assert len(lines) == 3
    for line, words in zip(lines, ["vocab.txt", "its fingerprint is", "step-00000010"]):
        assert words in line
