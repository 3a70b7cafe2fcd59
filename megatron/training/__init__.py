"""From flags to a trained model: `pretrain` builds the parts, `Trainer.fit` is the loop."""
