"""What fine-tuning leaves for others: models in Hugging Face's format, predictions, files for the GLUE benchmark."""
