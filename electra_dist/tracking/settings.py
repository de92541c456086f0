"""Turn a run's config into one flat table of settings, as tracking services and comparisons of runs show it."""

from __future__ import annotations

from typing import Any

from electra_dist.config import Config

_HIDDEN = "(hidden)"


def flat_settings(config: Config) -> dict[str, str | float | bool]:
    """Return the config as dotted keys, such as "train.num_steps", with their values; lists and null become text.

    The command `cluster.notify` is hidden.
    """
    settings: dict[str, str | float | bool] = {}
    for key, value in flattened(without_secrets(config.model_dump(mode="json"))).items():
        settings[key] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return settings


def without_secrets(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a config tree in which the command `cluster.notify` is hidden, because it may hold a secret address.

    The tree is the whole config; the given one is not changed.
    """
    cluster = tree.get("cluster") or {}
    if not cluster.get("notify"):
        return tree
    return {**tree, "cluster": {**cluster, "notify": _HIDDEN}}


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a tree of dictionaries as one dictionary from dotted keys to values; an empty dictionary is a value.

    Args:
        tree: the tree.
        prefix: beginning of all keys, with its dot.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
