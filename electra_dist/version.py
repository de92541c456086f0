"""Hold the version of electra-dist, which every run records beside the versions of its libraries."""

VERSION = "0.1.0"
