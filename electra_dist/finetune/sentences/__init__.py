"""Score tokens, sentences and minimal pairs by the head with which a model was pretrained, without fine-tuning."""
