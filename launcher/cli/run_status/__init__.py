"""What `electra-dist status` reads and shows: a snapshot of a run, and the page and the JSON object made from it."""
