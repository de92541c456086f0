"""Pretrain ELECTRA models at scale with PyTorch and DeepSpeed.

For notebooks and scripts, this module offers the functions below; docs/api.md describes them.

    import electra_dist as ed
    corpus = ed.open_corpus("s3://bucket/corpus")
    rows = corpus.batch(step=1000, global_batch=2048)
    model = ed.load("runs/base", tower="discriminator")
    ed.replaced_probability(model, ["the chef ate the meal"])

Cost: the import takes a few milliseconds, because torch and the rest are imported when a function is first used.
"""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from electra_dist.version import VERSION as __version__

if TYPE_CHECKING:
    from electra_dist.api import (
        Corpus,
        build_objective,
        build_towers,
        load,
        load_weights,
        metrics,
        open_corpus,
        replaced_probability,
        score_texts,
        step_input,
    )
    from electra_dist.config import Config
    from electra_dist.config.load import load_config
    from electra_dist.errors import UserError
    from electra_dist.pretrained.encoder import Pretrained
    from electra_dist.run.folder import open_run

__all__ = [
    "Config",
    "Corpus",
    "Pretrained",
    "UserError",
    "__version__",
    "build_objective",
    "build_towers",
    "load",
    "load_config",
    "load_weights",
    "metrics",
    "open_corpus",
    "open_run",
    "replaced_probability",
    "score_texts",
    "step_input",
]
# Public name -> the module that defines it; all others are in electra_dist.api.
_MODULES = {
    "Config": "electra_dist.config",
    "Pretrained": "electra_dist.pretrained.encoder",
    "UserError": "electra_dist.errors",
    "load_config": "electra_dist.config.load",
    "open_run": "electra_dist.run.folder",
}


def __getattr__(name: str) -> Any:
    """Import a public name, such as `load`, at its first use. A function is wrapped to check its arguments."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "electra_dist.api")), name)
    if isinstance(value, FunctionType):
        value = import_module("electra_dist.argument_checks").checked(value)
    globals()[name] = value  # so that this function is called once for each name
    return value


def __dir__() -> list[str]:
    """Return the names that the module offers, for completion in a notebook."""
    return sorted(__all__)
