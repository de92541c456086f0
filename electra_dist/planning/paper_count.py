"""Counts the training FLOPs of a run by the ELECTRA paper's method, so that a plan can be compared with its tables.

The method is that of `paper_flops.py`: backward counts as much as forward, look-ups count as matrix products, small
operations count, and a softmax over the vocabulary counts at 15.625 % of the positions. Rows are counted as full.
"""

from __future__ import annotations

from dataclasses import replace

from electra_dist.config import Config, TowerConfig
from electra_dist.planning.paper_flops import Network, PaperFlops


def run_flops_by_paper(config: Config) -> float | None:
    """Return the training FLOPs of a whole run, forward and backward over all its steps, as the ELECTRA paper counts.

    For the objective `mlm`, the one network counts. For `rtd`, the discriminator counts, and the generator if it is
    trained; a generator that draws tokens without a network costs nothing.

    Returns:
        The FLOPs of `train.num_steps` steps of `train.global_batch` full rows. None for runs that the paper's method
        does not cover: `model.architecture: modern`; objectives other than `rtd` and `mlm`; and `rtd` with a frozen
        generator, with two-stage training (`objective.generator_only_steps`) or with joint MLM
        (`objective.discriminator_mlm_weight`).
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
    """Return the sizes of one tower with a head over the vocabulary, for counting its FLOPs."""
    return Network(
        hidden=tower.hidden_size,
        layers=tower.num_layers,
        seq_len=config.data.seq_len,
        vocab=config.model.vocab_size,
        embedding=embedding_size,
        intermediate=tower.intermediate_size,
        heads=tower.num_heads,
    )
