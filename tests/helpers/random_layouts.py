"""Draws random configurations: layouts x model options x schedules x experts. Most are legal; the others must be
rejected with the name of a flag. A seed always gives the same configuration.

    python -m tests.helpers.random_layouts 0 40      # the verdicts of tools/check_layout.py on seeds 0 to 39
"""

from __future__ import annotations

import sys
from random import Random
from typing import Any

from megatron.cli.check_layout import main
from tests.helpers.runs import flags

MOST_RANKS = 8


def random_settings(seed: int) -> dict[str, Any]:
    draw = Random(seed)
    settings: dict[str, Any] = {
        "attention_dropout": draw.choice([0, 0.1]),
        "optimizer": draw.choice(["adam", "sgd"]),
        "clip_grad": draw.choice([1.0, 0.0]),
        "vocab_size": draw.choice([97, 128, 130]),
        "make_vocab_size_divisible_by": draw.choice([1, 8, 16]),
        "overlap_grad_reduce": draw.random() < 0.4,
        "seed": seed,
    }
    settings |= _sizes(draw)
    settings |= _model(draw)
    settings |= _heads(draw, settings)
    settings |= _pipeline(draw, settings)
    settings |= _context(draw, settings)
    if draw.random() < 0.35:
        settings |= _experts(draw, settings)
    if settings["tensor_model_parallel_size"] > 1 or draw.random() < 0.03:
        settings["sequence_parallel"] = draw.random() < 0.5
    settings |= _recomputation(draw)
    return settings


def _sizes(draw: Random) -> dict[str, Any]:
    while True:
        tp, pp, cp = (draw.choice([1, 1, 2, 2, 4]) for _ in range(3))
        if 2 <= tp * pp * cp <= MOST_RANKS:
            break
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "micro_batch_size": draw.choice([1, 1, 2, 3]),
        "seq_length": draw.choice([16, 16, 24, 32]),
        "max_position_embeddings": 32,
        "global_batch_size": 24,
    }


def _model(draw: Random) -> dict[str, Any]:
    position = draw.choice(["learned_absolute", "rope", "none"])
    return {
        "normalization": draw.choice(["LayerNorm", "RMSNorm"]),
        "apply_layernorm_1p": draw.random() < 0.2,
        "swiglu": draw.random() < 0.5,
        "position_embedding_type": position,
        "rotary_percent": 0.5 if position == "rope" and draw.random() < 0.3 else None,
        "disable_bias_linear": draw.random() < 0.5,
        "add_qkv_bias": draw.random() < 0.2,
        "untie_embeddings_and_output_weights": draw.random() < 0.5,
        "ffn_hidden_size": draw.choice([None, 48, 88]),
        "apply_residual_connection_post_layernorm": draw.random() < 0.2,
        "window_size": draw.choice([None, None, None, "6 0"]),
    }


def _heads(draw: Random, settings: dict[str, Any]) -> dict[str, Any]:
    heads = draw.choice([4, 8, 8, 6]) if settings["tensor_model_parallel_size"] < 4 else draw.choice([4, 8])
    groups = draw.choice([None, 1, 2, heads // 2])
    return {
        "num_attention_heads": heads,
        "hidden_size": heads * 8,
        "num_query_groups": groups,
        "group_query_attention": groups is not None,
        "qk_layernorm": draw.random() < 0.3,
        "kv_channels": draw.choice([None, None, 12]),
    }


def _pipeline(draw: Random, settings: dict[str, Any]) -> dict[str, Any]:
    pp = settings["pipeline_model_parallel_size"]
    if pp == 1:
        return {"num_layers": draw.choice([1, 2, 3])}
    how = draw.choice(["gpipe", "1f1b", "interleaved", "zero-bubble", "uneven"])
    if how == "interleaved":
        return {"num_layers": 2 * pp, "num_layers_per_virtual_pipeline_stage": 1, "micro_batch_size": 1}
    if how == "uneven":
        first, last = draw.choice([(2, None), (None, 2), (1, 2), (2, 2)])
        return {
            "num_layers": pp + sum(n - 1 for n in (first, last) if n is not None),
            "decoder_first_pipeline_num_layers": first,
            "decoder_last_pipeline_num_layers": last,
            "pipeline_schedule": draw.choice([None, "zero-bubble"]),
        }
    return {"num_layers": pp * draw.choice([1, 2]), "pipeline_schedule": how}


def _context(draw: Random, settings: dict[str, Any]) -> dict[str, Any]:
    if settings["context_parallel_size"] == 1:
        return {}
    return {"cp_comm_type": draw.choice(["p2p", "a2a", "allgather"])}


def _experts(draw: Random, settings: dict[str, Any]) -> dict[str, Any]:
    sigmoid = draw.random() < 0.4
    return {
        "disable_bias_linear": True,
        "num_experts": draw.choice([4, 4, 8, 6]),
        "moe_router_topk": draw.choice([1, 2, 2, 3]),
        "moe_ffn_hidden_size": draw.choice([None, 16]),
        "moe_layer_freq": draw.choice(["1", "2"]),
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": draw.choice([None, 0.05]),
        "moe_z_loss_coeff": draw.choice([None, 0.01]),
        "moe_router_score_function": "sigmoid" if sigmoid else None,
        "moe_router_enable_expert_bias": sigmoid and draw.random() < 0.5,
        "moe_shared_expert_intermediate_size": draw.choice([None, 16]),
        "moe_expert_capacity_factor": draw.choice([None, None, None, 1.5]),
        "expert_model_parallel_size": draw.choice([1, 2, 2, settings["context_parallel_size"]]),
    }


def _recomputation(draw: Random) -> dict[str, Any]:
    return draw.choice(
        [
            {},
            {},
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            {"recompute_granularity": "selective"},
        ]
    )


def words(seed: int) -> list[str]:
    """The configuration as words of check_layout's command line."""
    return ["--steps", "2", "--", *(word for text in flags(**random_settings(seed)) for word in text.split())]


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    for number in range(first, first + count):
        print(f"--- seed {number}: {' '.join(words(number)[3:])}", flush=True)
        print(f"--- seed {number}: exit code {main(words(number))}", flush=True)
