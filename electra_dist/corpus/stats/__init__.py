"""Write the HTML page of `electra-dist corpus stats`: figures, diagrams and samples of a corpus."""
