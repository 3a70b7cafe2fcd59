"""Pretrains a GPT: `torchrun pretrain_gpt.py --num-layers 12 ...` (all flags: docs/flags.md).

The program is megatron/cli/train.py, which is also installed as `megatron-train`; a script for a model of your own is a
copy of that file.
"""

import megatron_anywhere  # noqa: F401
from megatron.cli.train import datasets_provider, forward_step, main, model_provider

__all__ = ["datasets_provider", "forward_step", "main", "model_provider"]

if __name__ == "__main__":
    main()
