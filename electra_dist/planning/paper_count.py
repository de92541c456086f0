"""Count the training FLOPs of a run by the ELECTRA paper's method, so that a plan can be compared with its tables.

The method is that of `paper_flops.py`: backward counts as much as forward, look-ups count as matrix products, small
operations count, and a softmax over the vocabulary counts at 15.625 % of the positions. Rows are counted as full.
"""

from __future__ import annotations

from dataclasses import replace

from electra_dist.config import Config, TowerConfig
from electra_dist.planning.paper_flops import Network, PaperFlops


def run_flops_by_paper(config: Config) -> float | None:
    """Return the training FLOPs of a whole run as the ELECTRA paper counts; None if its method does not cover the run.

    The method covers `mlm` (one network) and `rtd` (the discriminator, and the generator if it is trained), but not
    `model.architecture: modern`, other objectives, a frozen generator, two-stage training and joint MLM.
    """
    model = config.model
    objective = config.objective
    is_plain_rtd = objective.name == "rtd" and objective.generator != "frozen"
    if model.architecture == "modern":
        return None
    has_more_parts = objective.generator_only_steps > 0 or objective.discriminator_mlm_weight > 0
    discriminator = _network(config, model.discriminator, model.embedding_size)
    if objective.name == "mlm":
        networks = [discriminator]
    elif is_plain_rtd and not has_more_parts:
        networks = [replace(discriminator, detects=True)]
        if objective.generator == "trained":
            networks.append(_network(config, model.generator, model.generator_embedding_width))
    else:
        return None
    rows = config.train.global_batch * config.train.num_steps
    return PaperFlops(name=config.run_dir, printed="", networks=tuple(networks), rows=rows).paper()


def _network(config: Config, tower: TowerConfig, embedding_size: int) -> Network:
    """Return one network with a head over the vocabulary; `embedding_size` is the width of its embedding tables."""
    return Network(
        hidden=tower.hidden_size,
        layers=tower.num_layers,
        seq_len=config.data.seq_len,
        vocab=config.model.vocab_size,
        embedding=embedding_size,
        intermediate=tower.intermediate_size,
        heads=tower.num_heads,
    )
