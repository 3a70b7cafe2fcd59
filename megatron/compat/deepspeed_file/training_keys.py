"""Keys of DeepSpeed's JSON about batches, the optimizer, the schedule and number formats."""

from collections.abc import Mapping
from types import MappingProxyType

from megatron.compat.deepspeed_file.keys import Kind, block, decided, no_effect, refused, sets

_ONE_OPTIMIZER = "one implementation of each optimizer, see --kernels"

_SCHEDULER_PARAMETERS: Mapping[Kind, str] = MappingProxyType(
    {
        "number": """warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio cycle_min_lr cycle_max_lr decay_lr_rate
            lr_range_test_min_lr lr_range_test_step_rate""",
        "whole": """warmup_num_steps cycle_first_step_size cycle_second_step_size cycle_first_stair_count
            cycle_second_stair_count decay_step_size lr_range_test_step_size""",
        "text": "warmup_type",
        "switch": "lr_range_test_staircase",
    }
)
"""Parameters of DeepSpeed's schedules; our settings have the same names."""


def _loss_scale(value: float) -> float | None:
    return None if value == 0 else value


def _power_of_two(power: float) -> float:
    if not 0 <= power <= 126:
        raise ValueError("give a power of 2 from 0 to 126")
    return 2.0**power


BATCH = (
    sets("train_batch_size", "whole", "global_batch_size", "samples of a step over all ranks"),
    sets("train_micro_batch_size_per_gpu", "whole", "micro_batch_size"),
    sets(
        "gradient_accumulation_steps",
        "whole",
        "gradient_accumulation_steps",
        "one of the three may be missing: train_batch_size = micro-batch x accumulation x data-parallel ranks",
    ),
    refused("managed_gradient_accumulation", "switch", "accumulation is counted by the engine; remove it", True),
    no_effect("dataloader_drop_last", "switch", "a last, incomplete batch is never trained on"),
)

OPTIMIZER = (
    *block(
        "optimizer",
        decided(
            "type",
            "text",
            "`--optimizer`: AdamW and Adam are adam; SGD, Lion and Muon keep their names; others are rejected",
        ),
        no_effect("legacy_fusion", "switch", _ONE_OPTIMIZER),
        *block(
            "params",
            decided("lr", "number", "`--lr`"),
            decided("betas", "list", "`--adam-beta1`, `--adam-beta2`; Lion: `--lion-beta1`, `--lion-beta2`"),
            decided("eps", "number", "`--adam-eps`"),
            decided(
                "weight_decay",
                "number",
                "`--weight-decay`; default 0.01 with AdamW and 0 with the others, as in torch.optim",
            ),
            decided(
                "momentum",
                "number",
                "`--sgd-momentum` (default 0, as in torch.optim), `--muon-momentum` (default 0.95)",
            ),
            decided("adam_w_mode", "switch", "Adam only; `false`: `--no-decoupled-weight-decay`"),
            decided("muon_lr adam_lr", "number", "Muon only; must equal `lr`, because one rate is used"),
            no_effect("ns_method", "text", "the Newton-Schulz steps have one implementation"),
            refused("per_head_muon", "switch", "queries, keys and values are one matrix each; remove it", False),
            refused("max_grad_norm", "number", "use the key gradient_clipping"),
            refused("bias_correction", "switch", "Adam's moments are always corrected; remove it", True),
            refused("amsgrad", "switch", "remove it", False),
            refused("maximize", "switch", "a loss is minimised; remove it", False),
            refused("nesterov", "switch", "remove it", False),
            refused("dampening", "number", "remove it", 0),
            no_effect("torch_adam fused foreach capturable differentiable", "switch", _ONE_OPTIMIZER),
        ),
    ),
)

SCHEDULER = (
    *block(
        "scheduler",
        sets("type", "text", "lr_schedule", "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest"),
        *block(
            "params",
            sets(
                "total_num_steps",
                "whole",
                "total_num_steps",
                "default: --train-iters, with a notice (DeepSpeed requires it)",
            ),
            *(sets(f"{name}", kind, name) for kind, names in _SCHEDULER_PARAMETERS.items() for name in names.split()),
            no_effect("cycle_min_mom cycle_max_mom decay_mom_rate", "number", "the momentum is constant"),
            refused(
                "cycle_momentum",
                "switch",
                "the momentum is constant; write false, because DeepSpeed's OneCycle cycles it by default",
                False,
            ),
            refused("last_batch_iteration", "whole", "--load resumes a schedule; remove it", -1),
        ),
    ),
)

PRECISION = (
    *block(
        "fp16",
        sets("enabled", "switch", "fp16"),
        sets("loss_scale", "number", "loss_scale", "0 is a dynamic scale", _loss_scale),
        sets(
            "initial_scale_power",
            "whole",
            "initial_loss_scale",
            '2 to this power; default 16, as DeepSpeed documents, also with `"enabled": "auto"` and `--fp16` '
            "(`--fp16` without this block starts at 2^32)",
            _power_of_two,
        ),
        sets("loss_scale_window", "whole", "loss_scale_window"),
        sets("hysteresis", "whole", "hysteresis"),
        sets("consecutive_hysteresis", "switch", "consecutive_hysteresis"),
        sets("min_loss_scale", "number", "min_loss_scale"),
        no_effect("auto_cast", "switch", "token ids need no cast; the engine for other models casts its inputs"),
        no_effect("fused_mode", "switch", _ONE_OPTIMIZER),
        refused("fp16_master_weights_and_grads", "switch", "masters are fp32; remove it", False),
    ),
    *(
        key
        for name in ("bf16", "bfloat16")
        for key in block(
            name,
            sets("enabled", "switch", "bf16"),
            no_effect("immediate_grad_update", "switch", "gradients are accumulated as backward makes them"),
            no_effect("check_grad_overflow", "switch", "see --no-check-for-nan-in-loss-and-grad"),
            refused("bf16_master_weights_and_grads", "switch", "masters are fp32; remove it", False),
            refused("bf16_optimizer_states", "switch", "remove it", False),
        )
    ),
    refused("amp", "block", "use fp16 or bf16"),
    refused("torch_autocast", "block", "use fp16 or bf16"),
    *block("data_types", refused("grad_accum_dtype", "text", "gradients are accumulated in fp32; remove it", "fp32")),
    sets("gradient_clipping", "number", "clip_grad", "0 disables clipping; default 1.0, as DeepSpeed documents"),
)
