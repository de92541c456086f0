"""Fixtures of the command tests: prose, a tiny encoder, and checkpoint targets."""

from support.corpus_texts import prose
from support.s3_fixtures import bucket, open_s3, two_targets
from support.s3_fixtures import moto as s3
from support.small_encoder import encoder, model, vocabulary

__all__ = ["bucket", "encoder", "model", "open_s3", "prose", "s3", "two_targets", "vocabulary"]
