"""Implement tasks on single texts and pairs of texts: the nine tasks of GLUE, and those in files of a user."""
