"""Pooch inside the training loops of other frameworks.

Each module imports its framework, and nothing imports these modules but the program that uses them::

    from pooch.integrations.transformers import PoochCallback    # Trainer, SFTTrainer, with PEFT or without
    from pooch.integrations.lightning import PoochCallback

Accelerate, MONAI and ignite leave the loop, or the model and optimizer, to the program: `pooch.auto` is all they need.
"""
