"""Run pretraining: input checks, step loop, refusal of steps with a bad loss, checkpoints, evaluation, reports."""
