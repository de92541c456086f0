"""The electra-dist command."""
