"""Drive DeepSpeed: the engine, the optimizers, the learning rate, and the training state at each ZeRO stage."""

import logging

# DeepSpeed warns at its import of every machine without a GPU. `check_gpus` warns of those that should have one.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
