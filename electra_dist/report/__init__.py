"""What a person looks at: report.html and the curves."""
