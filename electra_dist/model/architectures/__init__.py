"""The parts of a tower in each architecture (`bert`, `modern`), created through one interface (`choice.py`)."""
