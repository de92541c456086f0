"""Import once, before any fork, what a rank imports only when an engine or an S3 client is made: 5 s."""

from __future__ import annotations

import gc

import boto3.s3.inject  # noqa: F401
import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.muon.original_muon

import electra_dist.train.pretrain_rank  # noqa: F401


def prepare_forks() -> None:
    """Find DeepSpeed's operations, for which it starts compilers (0.4 s), and let forks share what is imported."""
    deepspeed.ops.__compatible_ops__  # noqa: B018
    gc.collect()
    gc.freeze()
