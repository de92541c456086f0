"""Turn a run's config into one flat table of settings, as tracking services and comparisons of runs show it."""

from __future__ import annotations

from typing import Any

from electra_dist.config import Config
from electra_dist.config.secrets import without_secrets

Settings = dict[str, str | float | bool]  # dotted keys of the config and their values

_DEFINING = ("seed", "model.", "objective.", "optimizer.", "data.", "train.")  # beginnings of keys


def flat_settings(config: Config) -> Settings:
    """Return the config as dotted keys, such as "train.num_steps", with their values; lists and null become text."""
    settings: Settings = {}
    for key, value in flattened(without_secrets(config.model_dump(mode="json"))).items():
        if value is None:
            settings[key] = "null"
        else:
            settings[key] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return settings


def hyperparameters(settings: Settings) -> Settings:
    """Return those settings that decide what a model learns, such as the keys of `model` and `train`."""
    return {key: value for key, value in settings.items() if key.startswith(_DEFINING)}


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries into one dictionary with dotted keys; an empty inner dictionary stays a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
