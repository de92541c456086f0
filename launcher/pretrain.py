"""Run pretraining on one rank, as `deepspeed launcher/pretrain.py --config CONFIG` starts it for every rank."""

from electra_launcher.entry import begin_program, end_process_with
from electra_launcher.pretrain import main

if __name__ == "__main__":
    begin_program()
    end_process_with(main)
