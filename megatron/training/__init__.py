"""From flags to a trained model: `pretrain` builds the parts (assemble.py), `Trainer.fit` (trainer.py) is the loop."""
