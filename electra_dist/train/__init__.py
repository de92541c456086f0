"""Run pretraining: inputs, the step loop, the step, the guard, checkpoints, evaluation and reports."""
