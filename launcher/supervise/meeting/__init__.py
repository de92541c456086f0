"""Read and write the files by which the supervisors of several nodes agree on each start of the ranks."""
