"""Read pretrained weights from runs and Hugging Face folders, and write them to Hugging Face folders."""
