"""Score text with a pretrained model and its pretraining head, without fine-tuning."""
