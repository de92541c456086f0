"""Write reports of recorded results: a page about a run, a page that compares runs, model cards, corpus pages."""
