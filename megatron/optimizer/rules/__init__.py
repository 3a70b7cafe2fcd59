"""Update rules, one per file: each says what state a weight has and how a gradient changes both."""

from megatron.optimizer.rules.base import Control, Slot, Slots, UpdateRule
