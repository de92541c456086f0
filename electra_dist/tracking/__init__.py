"""Show a run to people while it goes on: Weights & Biases, MLflow, and updates of report.html."""
