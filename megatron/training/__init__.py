"""Trains a model from flags: `pretrain` builds the parts (assemble.py), `Trainer.fit` (trainer.py) is the loop."""
