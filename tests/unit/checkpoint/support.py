"""A small training state with every kind of tensor, and functions that save and load it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import manifest, paths
from megatron.checkpoint.found_step import find_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.run_state import LoadedState, RunHistory, SavedInfo, Sharded, TrainState
from megatron.checkpoint.save import save_checkpoint
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError
from megatron.layout import Layout
from megatron.state.shard import Shard

HIDDEN, VOCABULARY, PADDED = 8, 13, 16
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    # name: (logical shape, stored shape of the whole, split dimension)
    "embedding.word_embeddings.weight": ((VOCABULARY, HIDDEN), (PADDED, HIDDEN), 0),
    "embedding.position_embeddings.weight": ((6, HIDDEN), (6, HIDDEN), 0),
    "layers.0.input_layernorm.weight": ((HIDDEN,), (HIDDEN,), 0),
    "layers.0.self_attention.query_key_value.weight": ((4, 3, 2, HIDDEN), (24, HIDDEN), 0),
    "layers.0.self_attention.query_key_value.bias": ((4, 3, 2), (24,), 0),
    "layers.0.self_attention.dense.weight": ((HIDDEN, 4, 2), (HIDDEN, 8), 1),
    "layers.0.mlp.dense_h_to_4h.weight": ((2, 12, HIDDEN), (24, HIDDEN), 1),
    "layers.0.mlp.dense_4h_to_h.weight": ((HIDDEN, 12), (HIDDEN, 12), 1),
    "final_layernorm.weight": ((HIDDEN,), (HIDDEN,), 0),
}
MODEL = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "max_position_embeddings": 6}


def one_process() -> ParallelState:
    return ParallelState.build(Layout(1), 0)


def make_params(
    seed: int = 0, dtype: torch.dtype = torch.float32, names: Iterable[str] = tuple(SHAPES)
) -> dict[str, Sharded]:
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name in names:
        logical, stored, dim = SHAPES[name]
        tensor = torch.randn(stored, generator=generator).to(dtype)
        if "embeddings" in name:
            tensor[logical[0] :] = 0
        params[name] = (Shard(name=name, logical_shape=logical, dim=dim), torch.nn.Parameter(tensor))
    return params


def make_state(iteration: int = 10, seed: int = 0, **changes: Any) -> TrainState:
    names = tuple(changes.pop("names", SHAPES))
    params, moments = make_params(seed, names=names), make_params(seed + 100, names=names)
    optimizer = {
        name: {"exp_avg": (spec, moments[name][1].data), "exp_avg_sq": (spec, moments[name][1].data ** 2)}
        for name, (spec, _) in params.items()
    }
    values: dict[str, Any] = {
        "iteration": iteration,
        "consumed_train_samples": iteration * 4,
        "consumed_valid_samples": 2,
        "params": params,
        "optimizer": optimizer,
        "optimizer_extra": {"step": iteration, "loss_scale": 65536.0},
        "scheduler": {"max_lr": 1e-3, "num_steps": iteration * 4},
        "rng": {"torch_cpu": torch.get_rng_state(), "python": {"version": 3, "words": [1, 2, 3], "gauss": None}},
        "config": {"model": MODEL, "training": {"seed": 1234}},
        "args": {"padded_vocab_size": PADDED, "hidden_size": HIDDEN, "num_layers": 1},
        "data": {"fingerprint": "abc", "seed": 1234},
    }
    return TrainState(**(values | changes))


def save(directory: Path, state: TrainState, history: RunHistory | None = None, **options: Any) -> SavedInfo:
    """Saves without a history, as run `run_id`, which also saved the steps whose manifests say so."""
    with ExitStack() as stack:
        if history is None:
            history = _history_of(directory, options.pop("run_id", "test"), state.iteration)
            stack.callback(history.close)
        return save_checkpoint(
            directory,
            state,
            parallel=one_process(),
            save_tokenizer=options.pop("save_tokenizer", write_tokenizer),
            history=history,
            **options,
        )


def _history_of(directory: Path, run_id: str, iteration: int) -> RunHistory:
    history = RunHistory(run_id)
    for step in paths.list_steps(directory):
        if step < iteration:
            history.started_from = max(history.started_from, step)
        with suppress(CheckpointError):
            if manifest.read(paths.step_directory(directory, step)).run_id == run_id:
                history.committed_steps(directory).add(step)
    return history


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def load(directory: Path, params: dict[str, Sharded] | None = None, **options: Any) -> LoadedState | None:
    """Finds and loads a step as a run does."""
    log = options.pop("messages", []).append
    which = {name: options.pop(name) for name in ("step", "save_dir", "strict", "check_hashes") if name in options}
    params = make_params(seed=77) if params is None else params
    history = options.get("history")
    found = find_checkpoint(directory, parallel=one_process(), history=history, log=log, **which)
    if found is None:
        return None
    return load_checkpoint(found, parallel=one_process(), params=params, log=log, **options)


def loaded_equals(directory: Path, state: TrainState, **options: Any) -> bool:
    """Returns whether a load restores every bit of `state`."""
    params = make_params(seed=77, names=state.params)
    loaded = load(directory, params, **options)
    assert loaded is not None and loaded.optimizer is not None and state.optimizer is not None
    same = all(torch.equal(params[name][1], tensor) for name, (_, tensor) in state.params.items())
    for name, kinds in state.optimizer.items():
        same &= all(torch.equal(loaded.optimizer[name][kind], tensor) for kind, (_, tensor) in kinds.items())
    return same and loaded.iteration == state.iteration
