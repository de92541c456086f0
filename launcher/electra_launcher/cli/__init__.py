"""Define the command line `electra-dist`: `main.py` holds the entry point, the other files hold the subcommands."""
