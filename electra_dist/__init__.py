"""Pretrain ELECTRA models at scale with PyTorch and DeepSpeed."""

from electra_dist.version import VERSION as __version__

__all__ = ["__version__"]
