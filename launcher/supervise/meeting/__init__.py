"""Read and write the files by which the supervisors of several nodes agree on a start of the ranks."""
