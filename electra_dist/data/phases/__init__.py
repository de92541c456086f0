"""Runs whose rows come from another corpus from some step on: the config key `data.phases`."""
