"""Update rules, one per file: each defines a weight's state and how a gradient changes both."""

from megatron.optimizer.rules.base import Control, Slot, Slots, UpdateRule
