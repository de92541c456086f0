"""Write the report of a run: report.html and its curves."""
