"""Training on several corpora in turn: the config key `data.phases` names the steps at which the corpus changes."""
