"""Fixtures of the library's tests: an S3 server and a bucket."""

from support.s3_fixtures import bucket
from support.s3_fixtures import moto as s3

__all__ = ["bucket", "s3"]
