"""The page of `electra-dist corpus stats`: what a corpus consists of, in figures, diagrams and samples."""
