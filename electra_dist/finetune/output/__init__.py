"""Write what fine-tuning produces: models in Hugging Face's format, predictions, files for the GLUE benchmark."""
