"""Names on the Hugging Face Hub in place of a model's folder, against a server that speaks the Hub's API."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from support.hub_server import TOKEN, Hub, hub

from electra_dist.config import ModelConfig
from electra_dist.config.load import load_config
from electra_dist.errors import StorageLost, UserError
from electra_dist.hub import _download, hub_name, model_folder
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import load_pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.pretrained.weights import find_source
from electra_dist.tokenizer import Vocabulary

__all__ = ["hub"]
OTHER_FILES = {"README.md": b"#", "tf_model.h5": b"x" * 100, "checkpoint-5/model.safetensors": b"x" * 100}


@pytest.fixture
def exported(model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path) -> Path:
    """An export with its two towers, and beside them files that no program of this project reads."""
    state = build_towers(model, 3).state_dict()
    for tower in ("discriminator", "generator"):
        export_tower(state, model, tower, vocabulary, True, tmp_path / "export" / tower)  # type: ignore[arg-type]
    for name, data in OTHER_FILES.items():
        (tmp_path / "export" / "discriminator" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "export" / "discriminator" / name).write_bytes(data)
    return tmp_path / "export"


def same_weights(spec: str, folder: Path) -> bool:
    """Whether a name and a folder hold the same tower."""
    ours, theirs = load_pretrained(spec).state, load_pretrained(str(folder)).state
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_name_stands_for_the_folder_that_was_uploaded_and_only_its_own_files_are_downloaded(
    hub: Hub, exported: Path
) -> None:
    commit = hub.commit("google/electra-tiny", exported / "discriminator")

    assert same_weights("google/electra-tiny", exported / "discriminator")
    assert load_pretrained("google/electra-tiny").name == f"google/electra-tiny@{commit[:12]}"
    downloaded = {path.name for path in model_folder("google/electra-tiny").rglob("*")}
    assert {"config.json", "model.safetensors", "vocab.txt"} <= downloaded
    assert not downloaded & {Path(name).parts[0] for name in OTHER_FILES}


def test_both_towers_of_an_uploaded_export_are_found(
    hub: Hub, exported: Path, tiny_config: Callable[..., Path]
) -> None:
    hub.commit("we/export", exported)
    assert same_weights("hf://we/export", exported / "discriminator")
    train = load_config(tiny_config(), ["train.init_from=we/export"]).train
    source = find_source(train)
    for found, tower in ((source.discriminator, "discriminator"), (source.generator, "generator")):
        assert found is not None
        assert (found / "model.safetensors").read_bytes() == (exported / tower / "model.safetensors").read_bytes()


def test_weights_of_pickled_tensors_are_downloaded_only_where_there_are_no_others(
    hub: Hub, exported: Path, tmp_path: Path
) -> None:
    folder = exported / "discriminator"
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    hub.commit("we/both", folder)
    assert not (model_folder("we/both") / "pytorch_model.bin").exists()
    expected = load_pretrained(str(folder)).state
    (folder / "checkpoint-5" / "model.safetensors").unlink()
    (folder / "model.safetensors").unlink()
    hub.commit("we/old", folder)
    assert torch.equal(load_pretrained("we/old").state["head.dense.weight"], expected["head.dense.weight"])


def test_a_revision_stays_what_it_was_and_a_process_sees_one_commit(hub: Hub, exported: Path) -> None:
    first = hub.commit("we/model", exported / "discriminator")
    hub.commit("we/model", exported / "discriminator", branch="chck_10M")
    before = model_folder("we/model")
    second = hub.commit("we/model", exported / "generator")
    assert model_folder("we/model") == before and before.name == first
    _download.cache_clear()  # another process
    assert model_folder("we/model").name == second
    assert model_folder("we/model@chck_10M").name == model_folder(f"we/model@{first}").name == first


def test_offline_mode_takes_the_cache_and_says_what_it_lacks(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("we/model", exported / "discriminator")
    online = model_folder("we/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _download.cache_clear()
    hub.requests.clear()
    assert model_folder("we/model") == online
    with pytest.raises(UserError, match=r"we/other@v1: not in the cache .*, and HF_HUB_OFFLINE is set; unset it"):
        model_folder("we/other@v1")
    assert hub.requests == []


def test_a_gated_model_needs_the_token(hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("we/gated", exported / "discriminator")
    hub.gated.add("we/gated")
    with pytest.raises(UserError, match=r"we/gated: gated on http://.*; accept its terms there, then set HF_TOKEN"):
        model_folder("we/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert same_weights("we/gated", exported / "discriminator")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("we/missing", "we/missing: not found on http://.*; correct the name"),
        ("we/model@other", "we/model@other: no such revision on http"),
        ("hf://we", "hf://we: not the name of a model on the Hub; write hf://ORG/NAME"),
        ("we/a--b", "we/a--b: not found on http"),  # which the Hub accepts for no repository
    ],
)
def test_a_wrong_name_is_refused_in_one_line(hub: Hub, exported: Path, name: str, message: str) -> None:
    hub.commit("we/model", exported / "discriminator")
    with pytest.raises(UserError, match=message) as error:
        model_folder(name)
    assert "\n" not in str(error.value) and not isinstance(error.value, StorageLost)


def test_a_hub_that_does_not_answer_is_storage_that_is_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StorageLost, match=r"we/model: http://127.0.0.1:1 does not give it") as error:
        model_folder("we/model")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("we/model: no such folder here; and as a name on the Hub, we/model: http")
    with pytest.raises(StorageLost) as error:
        model_folder("hf://we/model")
    assert str(error.value).startswith("we/model: http")


def test_a_path_is_never_looked_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "small").mkdir(parents=True)
    for path in ("runs/small", "runs/smal", "./we/model", "../we/model", "/we/model", "model", "a/b/c", "random:x/y"):
        assert hub_name(path) is None
    assert hub_name("hf://runs/small") is not None
    assert hub.requests == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    _download.cache_clear()
    with pytest.raises(UserError, match=r"we/model: a model on the Hub needs packages.*; run: pip install"):
        model_folder("we/model")


SCORE = """
import sys
from electra_launcher.cli.main import app
app(["score", "--model", sys.argv[1]], standalone_mode=False)
assert "torch._dynamo" not in sys.modules, "torch's compiler, whose import takes a second"
"""


@pytest.mark.real_start
def test_a_command_reads_the_hub_of_its_environment(hub: Hub, exported: Path) -> None:
    hub.commit("we/model", exported / "discriminator")

    def score(model: str) -> str:
        command = [sys.executable, "-c", SCORE, model]
        done = subprocess.run(command, input="the boy is tired\n", capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert score("we/model") == score(str(exported / "discriminator"))
