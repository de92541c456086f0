"""Import, before any fork, the modules that a rank imports only when it makes an engine or an S3 client.

The imports take 5 s, which each fork then saves.
"""

from __future__ import annotations

import gc

import boto3.s3.inject  # noqa: F401
import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.muon.original_muon

import electra_dist.train.pretrain_rank  # noqa: F401


def prepare_forks() -> None:
    """Prepare this process for forks that train: do work that every rank would repeat, and share its memory.

    DeepSpeed looks for its compatible operations with compilers that it starts, which takes 0.4 s. The result is kept.
    """
    deepspeed.ops.__compatible_ops__  # noqa: B018
    gc.collect()
    gc.freeze()  # The garbage collector of a fork then leaves these objects alone, so their memory stays shared.
