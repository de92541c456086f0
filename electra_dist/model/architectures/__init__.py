"""The architectures that the towers can have, behind one interface (`choice.py`)."""
