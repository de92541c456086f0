"""Write report.html, the report of a training run on one page, with its curves."""
