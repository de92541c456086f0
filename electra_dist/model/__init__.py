"""The two towers, their heads, and the way to and from Hugging Face."""
