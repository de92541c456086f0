"""Sections of the config, one class each; `electra_dist.config` puts them together."""
