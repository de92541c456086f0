"""The command `electra-dist`, with one file for each subcommand."""
