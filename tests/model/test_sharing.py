"""What the towers share: parameters that exist, their start, and what an exported tower reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64_truth import shaken
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, pipeline

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.model.attention import SdpaMask, attention_bias, derive
from electra_dist.model.counts import parameter_counts
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.export import export_towers
from electra_dist.tokenizer import Vocabulary

SHARING = [
    pytest.param({"sharing": "embeddings"}, id="embeddings"),
    pytest.param({"sharing": "none"}, id="none"),
    pytest.param({"sharing": "none", "generator_embedding_size": 16}, id="none-own-width"),
    pytest.param({"sharing": "gdes"}, id="gdes"),
    pytest.param({"sharing": "all", "generator": 64}, id="all"),
]
VOCABULARY = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(295))]) + "\n"
OBJECTIVES = ["rtd", "mlm", "rtd_masked_only", "replace_mlm", "all_tokens_mlm", "electric", "adversarial"]
BUILDABLE = [  # `check_sharing` refuses the others
    pytest.param(name, *sharing.values, id=f"{name}-{sharing.id}")
    for name in OBJECTIVES
    for sharing in SHARING
    if (name, sharing.id) != ("electric", "all") and (name != "mlm" or sharing.id == "embeddings")
]


def config(make_config: Callable[..., ModelConfig], fields: dict[str, Any]) -> ModelConfig:
    rest = {key: value for key, value in fields.items() if key != "generator"}
    return make_config(32, 64, fields.get("generator", 16), **rest)


@pytest.mark.parametrize(("name", "fields"), BUILDABLE)
def test_count_equals_what_is_built(name: Any, fields: Any, make_config: Callable[..., ModelConfig]) -> None:
    model, objective = config(make_config, fields), ObjectiveConfig(name=name)
    towers = build_towers(model, 1, objective)
    padding = model.padded_vocab_size - model.vocab_size
    tables = [module for module in towers.modules() if type(module).__name__ == "SharedEmbeddings"]
    built = sum(p.numel() for p in towers.parameters()) - padding * sum(t.word.embedding_dim for t in tables)
    count = parameter_counts(model, objective)
    assert count.total == built
    mine = ("embeddings", "discriminator", "discriminator_head", "token_head", "copy_gate")
    if fields["sharing"] in ("embeddings", "all"):
        kept = sum(p.numel() for n, p in towers.named_parameters() if n.split(".")[0] in mine)
        assert count.discriminator == kept - padding * 32


def test_a_fixed_generator_has_no_network(make_config: Callable[..., ModelConfig]) -> None:
    objective = ObjectiveConfig(generator="uniform")
    towers = build_towers(make_config(), 1, objective)
    assert {name.split(".")[0] for name, _ in towers.named_parameters()} == {
        "embeddings",
        "discriminator",
        "discriminator_head",
    }
    assert parameter_counts(make_config(), objective).generator_only == 0


def test_a_difference_starts_at_zero_and_own_tables_do_not(make_config: Callable[..., ModelConfig]) -> None:
    for sharing in ("gdes", "none"):
        towers = build_towers(make_config(sharing=sharing), 1)
        own = towers.discriminator_embeddings
        tables = [own.word.weight, own.position.weight, own.token_type.weight]
        assert all(bool(table.any()) == (sharing == "none") for table in tables)
        assert (own.layer_norm.weight == 1).all()
        assert not own.word.weight[300:].any()
        assert not torch.equal(own.word.weight, towers.embeddings.word.weight)


def test_two_towers_of_one_set_of_layers_have_one_name(make_config: Callable[..., ModelConfig]) -> None:
    towers = build_towers(make_config(sharing="all"), 1)
    assert towers.generator is towers.discriminator
    assert not any(name.startswith("generator.") for name in towers.state_dict())


@pytest.mark.parametrize("fields", SHARING)
def test_exported_towers_answer_alike(
    fields: Any, tmp_path: Path, make_config: Callable[..., Any], make_rows: Callable[..., Any], special: Any
) -> None:
    model = config(make_config, fields)
    towers = build_towers(model, 1).eval()
    with torch.no_grad():
        for parameter in towers.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    (tmp_path / "vocab.txt").write_text(VOCABULARY)
    folders = export_towers(towers.state_dict(), model, Vocabulary.read(tmp_path / "vocab.txt"), True, tmp_path)
    ids = make_rows([[(10, 7)]], seq_len=20)
    layout = derive(ids, special)
    mask = SdpaMask(attention_bias(layout, torch.float32))
    inputs = {"input_ids": ids, "token_type_ids": layout.token_type_BS}
    with torch.no_grad():
        states = towers.discriminator(
            getattr(towers, "discriminator_embeddings", towers.embeddings)(ids, layout), mask, DropoutKeys.off(ids)
        )
        detection = AutoModelForPreTraining.from_pretrained(folders["discriminator"]).eval()
        assert (detection(**inputs).logits - towers.discriminator_head.logits(states)).abs().max() <= 1e-5
        slots = towers.generator_head.transform(
            towers.generator(towers.embeddings(ids, layout), mask, DropoutKeys.off(ids))
        )
        predicted = slots @ towers.embeddings.word.weight[:300].T + towers.generator_head.bias
        filler = AutoModelForMaskedLM.from_pretrained(folders["generator"]).eval()
        assert (filler(**inputs).logits - predicted).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["mlm", "replace_mlm", "all_tokens_mlm"])
def test_a_large_tower_that_predicts_tokens_is_exported_with_its_token_head(
    name: Any, tmp_path: Path, make_config: Callable[..., Any], make_rows: Callable[..., Any], special: Any
) -> None:
    model = make_config(32, 64, 16)
    towers = build_towers(model, 1, ObjectiveConfig(name=name)).eval()
    (tmp_path / "vocab.txt").write_text(VOCABULARY)
    folders = export_towers(towers.state_dict(), model, Vocabulary.read(tmp_path / "vocab.txt"), True, tmp_path)
    assert ("generator" in folders) == (name != "mlm")
    ids = make_rows([[(18, 0)]], seq_len=20)
    layout = derive(ids, special)
    with torch.no_grad():
        states = towers.discriminator(
            towers.embeddings(ids, layout), SdpaMask(attention_bias(layout, torch.float32)), DropoutKeys.off(ids)
        )
        ours = towers.token_head.transform(states) @ towers.discriminator_table()[:300].T + towers.token_head.bias
        theirs = AutoModelForMaskedLM.from_pretrained(folders["discriminator"]).eval()
        assert (theirs(input_ids=ids).logits - ours).abs().max() <= 1e-5


@pytest.mark.parametrize("sharing", ["embeddings", "gdes"])
def test_the_second_head_of_joint_mlm_is_exported_as_a_model_that_fills_masks(
    sharing: str, tmp_path: Path, make_config: Callable[..., Any], special: Any
) -> None:
    """transformers' pipeline predicts with the folder `masked_lm` what the second head predicts."""
    model = make_config(32, 64, 16).model_copy(update={"sharing": sharing})
    towers = shaken(build_towers(model, 1, ObjectiveConfig(discriminator_mlm_weight=1.0))).eval()
    (tmp_path / "vocab.txt").write_text(VOCABULARY)
    vocabulary = Vocabulary.read(tmp_path / "vocab.txt")
    folders = export_towers(towers.state_dict(), model, vocabulary, True, tmp_path)
    assert list(folders) == ["discriminator", "generator", "masked_lm"]
    text = "w3 w8 [MASK] w5"

    predicted: Any = pipeline("fill-mask", model=str(folders["masked_lm"]), device="cpu", top_k=3)(text)

    ids = torch.tensor([[special.cls, *(vocabulary.ids[word] for word in text.split()), special.sep]])
    layout = derive(ids, special)
    mask = SdpaMask(attention_bias(layout, torch.float32))
    with torch.no_grad():
        states = towers.discriminator(
            getattr(towers, "discriminator_embeddings", towers.embeddings)(ids, layout), mask, DropoutKeys.off(ids)
        )
        logits = towers.token_head.transform(states) @ towers.discriminator_table()[:300].T + towers.token_head.bias
    best = logits[0, 3].softmax(-1).topk(3)
    assert [one["token"] for one in predicted] == best.indices.tolist()
    assert [one["score"] for one in predicted] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_electrics_causal_towers_are_not_exported(
    tmp_path: Path, make_config: Callable[..., Any], special: Any
) -> None:
    model = make_config(32, 64, 16)
    state = build_towers(model, 1, ObjectiveConfig(name="electric")).state_dict()
    (tmp_path / "vocab.txt").write_text(VOCABULARY)
    assert list(export_towers(state, model, Vocabulary.read(tmp_path / "vocab.txt"), True, tmp_path)) == [
        "discriminator"
    ]
