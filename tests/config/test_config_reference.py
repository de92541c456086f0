"""docs/config.md is what the fields of the config say."""

from __future__ import annotations

from support.real_runs import REPOSITORY

from electra_dist.config import Config
from electra_dist.config.reference import reference


def test_the_page_in_docs_is_current() -> None:
    text = (REPOSITORY / "docs" / "config.md").read_text()
    assert text == reference(), "docs/config.md is not current: run `make docs/config.md`"


def test_the_page_has_every_key_of_a_resolved_config_once() -> None:
    page = reference()

    def keys(model: type, prefix: str = "") -> list[str]:
        names = []
        for name, field in model.model_fields.items():
            inner = getattr(field.annotation, "model_fields", None)
            names += keys(field.annotation, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
        return names

    for key in keys(Config):
        assert page.count(f"| `{key}`<br>") == 1, key
