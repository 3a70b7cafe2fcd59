"""A checkpoint restores every bit, in files with the names that other tools expect."""

from __future__ import annotations

import errno
import json
import multiprocessing
import socket
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import manifest, paths
from megatron.checkpoint.lock import DirectoryLock
from megatron.checkpoint.run_state import RunHistory
from megatron.checkpoint.save import hold_directory
from megatron.checkpoint.verify import inspect_step
from megatron.errors import CheckpointError, ConfigError, NonFiniteError, StorageError
from tests.unit.checkpoint.support import (
    MODEL,
    PADDED,
    load,
    loaded_equals,
    make_params,
    make_state,
    one_process,
    save,
)

# A manifest of another form would need another schema number, and a reader of both.
SLICE_KEYS = {"file", "key", "ranges", "shape", "start"}
MANIFEST_KEYS = [
    "args",
    "config",
    "consumed_train_samples",
    "consumed_valid_samples",
    "data",
    "files",
    "fingerprint",
    "hash",
    "holds",
    "layout",
    "model",
    "optimizer",
    "run_id",
    "schema",
    "step",
    "versions",
]
EARLIER = Path(__file__).parents[2] / "golden" / "checkpoint"
TENSOR_KEYS = {"logical_shape", "dtype", "dim", "slices", "fold"}


def test_round_trip_is_bit_equal(tmp_path: Path) -> None:
    state = make_state()
    info = save(tmp_path, state)
    assert info.path == tmp_path / "iter_0000010" and info.bytes_written > 0
    assert loaded_equals(tmp_path, state)
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.consumed_train_samples == 40 and loaded.consumed_valid_samples == 2
    assert loaded.optimizer_extra == state.optimizer_extra
    assert loaded.scheduler == state.scheduler
    record = manifest.read(tmp_path / "iter_0000010")
    assert record.data == state.data and record.config == state.config
    assert loaded.rng is not None and state.rng is not None
    assert torch.equal(loaded.rng["torch_cpu"], state.rng["torch_cpu"])
    assert loaded.rng["python"] == state.rng["python"]


def test_classic_tree_and_names(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    content = torch.load(tmp_path / "iter_0000010/mp_rank_00/model_optim_rng.pt", weights_only=True)
    assert content["checkpoint_version"] == 3.0 and content["iteration"] == 10
    assert content["args"].hidden_size == 8 and content["args"]["padded_vocab_size"] == PADDED
    assert content["args"].tokenizer_type == "PretrainedFromHF"
    assert Path(content["args"].tokenizer_name_or_path) == tmp_path / "iter_0000010/tokenizer"
    assert (tmp_path / "iter_0000010/tokenizer/tokenizer.json").is_file()
    language_model = content["model"]["language_model"]
    assert language_model["embedding"]["word_embeddings"]["weight"].shape == (PADDED, 8)
    assert language_model["embedding"]["position_embeddings"]["weight"].shape == (6, 8)
    assert "layers.0.self_attention.query_key_value.weight" in language_model["encoder"]
    assert "final_layernorm.weight" in language_model["encoder"]


def test_padding_rows_are_written_even_if_memory_has_none(tmp_path: Path) -> None:
    state = make_state()
    name = "embedding.word_embeddings.weight"
    spec, tensor = state.params[name]
    unpadded = {**state.params, name: (spec, tensor.detach()[:13].clone())}
    save(tmp_path, make_state(params=unpadded))
    content = torch.load(tmp_path / "iter_0000010/mp_rank_00/model_optim_rng.pt", weights_only=True)
    assert content["model"]["language_model"]["embedding"]["word_embeddings"]["weight"].shape == (PADDED, 8)
    params = make_params(seed=5)
    params[name] = (spec, torch.zeros(13, 8))
    load(tmp_path, params, finetune=True)
    assert torch.equal(params[name][1], unpadded[name][1])


def test_views_into_a_flat_buffer_do_not_drag_it_along(tmp_path: Path) -> None:
    flat = torch.randn(1_000_000)
    state = make_state()
    params = {
        name: (spec, flat[: tensor.numel()].view(tensor.shape) if "embeddings" not in name else tensor)
        for name, (spec, tensor) in state.params.items()
    }
    assert save(tmp_path, make_state(params=params)).bytes_written < 200_000


def test_a_model_that_is_not_a_gpt_keeps_its_names(tmp_path: Path) -> None:
    from megatron.state.shard import Shard

    weight = torch.nn.Parameter(torch.randn(3, 5))
    params = {"features.0.weight": (Shard(name="features.0.weight", logical_shape=(3, 5)), weight)}
    save(tmp_path, make_state(params=params, optimizer=None, config={}, args={}))
    target = torch.nn.Parameter(torch.zeros(3, 5))
    load(tmp_path, {"features.0.weight": (params["features.0.weight"][0], target)}, load_optim=False)
    assert torch.equal(target, weight)


def test_saving_the_loaded_or_committed_step_again_is_a_no_op(tmp_path: Path) -> None:
    state = make_state()
    with_history = RunHistory("a")
    save(tmp_path, state, with_history)
    before = (tmp_path / "iter_0000010/manifest.json").stat().st_mtime_ns
    assert save(tmp_path, state, with_history).already_there
    with_history.close()
    again = RunHistory("b")
    load(tmp_path, history=again)
    assert save(tmp_path, state, again).already_there
    assert (tmp_path / "iter_0000010/manifest.json").stat().st_mtime_ns == before
    again.close()


def test_a_step_whose_tracker_failed_is_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was committed. The run's next save does not set it aside, and saving it again writes the tracker."""
    write_tracker = paths.write_tracker

    def full(directory: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(RunHistory("run")) as history:
        save(tmp_path, make_state(iteration=10), history)
        monkeypatch.setattr(paths, "write_tracker", full)
        with pytest.raises(StorageError, match="No space left"):
            save(tmp_path, make_state(iteration=20), history)
        monkeypatch.setattr(paths, "write_tracker", write_tracker)
        assert paths.read_tracker(tmp_path).step == 10
        assert save(tmp_path, make_state(iteration=20), history).already_there
        assert paths.read_tracker(tmp_path).step == 20
        assert save(tmp_path, make_state(iteration=30), history).messages == ()
        assert save(tmp_path, make_state(iteration=20), history).already_there
        assert paths.read_tracker(tmp_path).step == 30, "it never goes back"
    assert paths.list_steps(tmp_path) == [30, 20, 10]


def test_another_runs_step_is_set_aside_not_overwritten(tmp_path: Path) -> None:
    save(tmp_path, make_state(seed=1), run_id="first")
    info = save(tmp_path, make_state(seed=2), run_id="second")
    assert any("abandoned-iter_0000010" in message for message in info.messages)
    assert inspect_step(tmp_path / "abandoned-iter_0000010")[1] == []
    assert loaded_equals(tmp_path, make_state(seed=2))


def test_retention_deletes_only_when_asked(tmp_path: Path) -> None:
    history = RunHistory("a")
    for step in range(1, 7):
        save(tmp_path, make_state(step), history)
    assert len(list(tmp_path.glob("iter_*"))) == 6
    save(tmp_path, make_state(7), history, retain_interval=4)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006", "iter_0000007"]
    save(tmp_path, make_state(8), history, retain_last=1)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000007", "iter_0000008"]
    assert not list(tmp_path.glob(".trash-*"))
    history.close()


def test_non_finite_state_is_not_committed(tmp_path: Path) -> None:
    history = RunHistory("a")
    save(tmp_path, make_state(1), history)
    bad = make_state(2)
    with torch.no_grad():
        bad.params["final_layernorm.weight"][1][3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"final_layernorm\.weight"):
        save(tmp_path, bad, history)
    assert [p.name for p in tmp_path.glob("*iter_*")] == ["iter_0000001"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    history.close()


def test_second_run_on_the_same_directory_is_refused_by_name(tmp_path: Path) -> None:
    first, second = RunHistory("first-run"), RunHistory("second-run")
    first.acquire(tmp_path)
    with pytest.raises(ConfigError, match="run first-run"):
        save(tmp_path, make_state(), second)
    first.close()
    save(tmp_path, make_state(), second)
    assert json.loads((tmp_path / ".lock").read_text())["run_id"] == "second-run"
    second.close()


def test_finetune_takes_weights_alone(tmp_path: Path) -> None:
    state = make_state()
    save(tmp_path, state)
    params = make_params(seed=5, dtype=torch.bfloat16)
    loaded = load(tmp_path, params, finetune=True)
    assert loaded is not None and loaded.iteration == 0 and loaded.consumed_train_samples == 0
    assert loaded.optimizer is None and loaded.rng is None and loaded.scheduler is None
    name = "final_layernorm.weight"
    assert torch.equal(params[name][1], state.params[name][1].to(torch.bfloat16))


def test_another_precision_is_refused_on_resume(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    with pytest.raises(CheckpointError, match="--finetune"):
        load(tmp_path, make_params(dtype=torch.bfloat16))


@pytest.mark.parametrize("part, flag", [("optimizer", "load_optim"), ("rng", "load_rng")])
def test_missing_parts_need_their_flag(tmp_path: Path, part: str, flag: str) -> None:
    save(tmp_path, make_state(**{part: None}))
    with pytest.raises(CheckpointError, match=f"--no-{flag.replace('_', '-')}"):
        load(tmp_path)
    loaded = load(tmp_path, **{flag: False})
    assert loaded is not None and getattr(loaded, part) is None and loaded.iteration == 10


def test_missing_extra_and_reshaped_tensors_are_listed(tmp_path: Path) -> None:
    from megatron.state.shard import Shard

    save(tmp_path, make_state())
    params = make_params()
    params["layers.1.input_layernorm.weight"] = params.pop("layers.0.input_layernorm.weight")
    spec, _ = params["final_layernorm.weight"]
    params["final_layernorm.weight"] = (
        Shard(name=spec.name, logical_shape=(9,)),
        torch.nn.Parameter(torch.ones(9)),
    )
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, params, finetune=True)
    text = str(caught.value)
    assert "missing: layers.1.input_layernorm.weight" in text
    assert "not in this model: layers.0.input_layernorm.weight" in text
    assert "final_layernorm.weight: model (9,), checkpoint (8,)" in text


def test_another_architecture_is_refused_listing_every_field(tmp_path: Path) -> None:
    from megatron.checkpoint.architecture import model_config

    save(tmp_path, make_state())
    same = model_config({**MODEL, "ffn_hidden_size": 32, "attention_dropout": 0.0})
    assert load(tmp_path, model_config=same) is not None
    other = model_config({**MODEL, "hidden_size": 16, "num_layers": 2, "swiglu": True})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, model_config=other)
    for field in ("--hidden-size: checkpoint 8, this run 16", "--num-layers: checkpoint 1, this run 2", "swiglu"):
        assert field in str(caught.value)


def test_longer_context_is_for_finetune_alone(tmp_path: Path) -> None:
    from megatron.checkpoint.architecture import model_config

    rope = {**MODEL, "position_embedding_type": "rope"}
    save(tmp_path, make_state(config={"model": rope}))
    longer = model_config({**rope, "rotary_base": 500000.0})
    with pytest.raises(CheckpointError, match=r"--rotary-base: checkpoint 10000\.0, this run 500000\.0"):
        load(tmp_path, model_config=longer)
    messages: list[str] = []
    load(tmp_path, model_config=longer, finetune=True, messages=messages)
    assert any("rotary-base changes from 10000.0" in message for message in messages)


def test_release_is_weights_at_iteration_zero(tmp_path: Path) -> None:
    state = make_state(0, optimizer=None, rng=None)
    save(tmp_path, state, release=True)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    params = make_params(seed=4)
    loaded = load(tmp_path, params)
    assert loaded is not None and loaded.iteration == 0 and loaded.optimizer is None
    assert all(torch.equal(params[name][1], tensor) for name, (_, tensor) in state.params.items())


def test_the_fingerprint_of_the_run_is_compared_on_resume(tmp_path: Path) -> None:
    saved = {"device": "cpu", "cpu_threads": 2, "kernels": {"rope": "native", "gelu": "torch"}}
    save(tmp_path, make_state(), fingerprint=saved)
    ours = {"device": "cpu", "cpu_threads": 1, "kernels": {"rope": "ref", "gelu": "torch", "adamw": "native"}}

    def warnings(**options: Any) -> list[str]:
        messages: list[str] = []
        load(tmp_path, messages=messages, **options)
        return [message for message in messages if "under other conditions" in message]

    (warning,) = warnings(fingerprint=ours)
    assert "(cpu_threads 2 -> 1, kernels.rope native -> ref)" in warning
    assert warnings(fingerprint=saved) == warnings() == warnings(fingerprint=ours, finetune=True) == []


def test_a_deterministic_run_does_not_go_on_with_other_kernels(tmp_path: Path) -> None:
    saved = {"device": "NVIDIA H100", "kernels": {"rope": "native", "gelu": "torch"}}
    save(tmp_path, make_state(), fingerprint=saved)
    fallen_back = {"device": "NVIDIA H200", "kernels": {"rope": "ref", "gelu": "torch"}}
    with pytest.raises(CheckpointError, match=r"--deterministic-mode: .* \(kernels.rope native -> ref\); "):
        load(tmp_path, fingerprint=fallen_back, deterministic=True)
    load(tmp_path, fingerprint=fallen_back)
    load(tmp_path, fingerprint=fallen_back, deterministic=True, finetune=True)  # weights only: a new run
    load(tmp_path, fingerprint={**saved, "device": "NVIDIA H200"}, deterministic=True)


def test_a_manifest_without_a_fingerprint_is_an_earlier_versions(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    assert manifest.read(tmp_path / "iter_0000010").fingerprint == {}
    messages: list[str] = []
    load(tmp_path, fingerprint={"cpu_threads": 1}, messages=messages)
    assert messages == []


def test_a_checkpoint_of_an_earlier_version_verifies_and_loads() -> None:
    """tests/golden/checkpoint is `make_state()`, saved before manifests had a fingerprint."""
    assert inspect_step(EARLIER / "iter_0000010", deep=True)[1] == []
    params, messages = make_params(seed=77), []
    loaded = load(EARLIER, params, fingerprint={"cpu_threads": 1}, messages=messages)
    assert loaded is not None and loaded.iteration == 10 and loaded.consumed_train_samples == 40
    assert loaded.optimizer is not None and messages == []
    content = torch.load(EARLIER / "iter_0000010/mp_rank_00/model_optim_rng.pt", weights_only=True)
    qkv = "layers.0.self_attention.query_key_value.weight"
    model = content["model"]["language_model"]
    assert torch.equal(params[qkv][1], model["encoder"][qkv])
    words = "embedding.word_embeddings.weight"
    assert torch.equal(params[words][1], model["embedding"]["word_embeddings"]["weight"])
    for name, kinds in content["optimizer"]["state"].items():
        assert all(torch.equal(loaded.optimizer[name][kind], tensor) for kind, tensor in kinds.items())
    assert loaded.rng is not None and torch.equal(loaded.rng["torch_cpu"], torch.arange(16, dtype=torch.uint8))


def test_the_manifest_keeps_its_format(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    body = json.loads((tmp_path / "iter_0000010/manifest.json").read_text())["manifest"]
    assert sorted(body) == sorted(MANIFEST_KEYS) and (body["schema"], body["hash"]) == (4, "xxh3_128")
    assert {key for entry in body["files"].values() for key in entry} == {"size", "blocks"}
    assert {key for tensor in body["model"].values() for key in tensor} == TENSOR_KEYS
    assert {key for t in body["model"].values() for s in t["slices"] for key in s} == SLICE_KEYS


def test_find_gives_the_config_before_a_model_exists(tmp_path: Path) -> None:
    from megatron.checkpoint.found_step import find_checkpoint

    save(tmp_path, make_state())
    found = find_checkpoint(tmp_path, parallel=one_process())
    assert found is not None and found.manifest.config["model"] == MODEL
    assert found.tokenizer == tmp_path / "iter_0000010/tokenizer"


def test_half_precision_with_fp32_masters_is_bit_equal(tmp_path: Path) -> None:
    params = make_params(seed=3, dtype=torch.bfloat16)
    masters = make_params(seed=3)
    optimizer = {name: {"master": (spec, masters[name][1].data + 1e-5)} for name, (spec, _) in params.items()}
    save(tmp_path, make_state(params=params, optimizer=optimizer))
    target = make_params(seed=4, dtype=torch.bfloat16)
    loaded = load(tmp_path, target)
    assert loaded is not None and loaded.optimizer is not None
    for name, (_, tensor) in params.items():
        assert torch.equal(target[name][1], tensor)
        assert torch.equal(loaded.optimizer[name]["master"], optimizer[name]["master"][1])
        assert loaded.optimizer[name]["master"].dtype == torch.float32


def test_a_run_can_hold_its_directory_before_it_saves(tmp_path: Path) -> None:
    first, second = RunHistory("first-run"), RunHistory("second-run")
    hold_directory(tmp_path / "new", parallel=one_process(), history=first)
    with pytest.raises(ConfigError, match=r"--save .*in use by run first-run \(pid \d+ on "):
        hold_directory(tmp_path / "new", parallel=one_process(), history=second)
    save(tmp_path / "new", make_state(), first)
    first.close()
    hold_directory(tmp_path / "new", parallel=one_process(), history=second)
    second.close()


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(tmp_path, "first-run")
    context = multiprocessing.get_context("fork")
    lives = context.Event()
    child = context.Process(target=lambda: (lives.set(), time.sleep(60)))
    child.start()
    lives.wait()
    lock.release()
    DirectoryLock.acquire(tmp_path, "second-run").release()
    child.kill()
    child.join()


def test_a_lock_whose_holder_is_dead_is_said_to_be_so(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    lock = DirectoryLock.acquire(tmp_path, "first-run")
    signed = {"run_id": "first-run", "host": socket.gethostname(), "pid": dead.pid}
    (tmp_path / ".lock").write_text(json.dumps(signed))
    with pytest.raises(ConfigError, match=rf"run first-run \(pid {dead.pid} on .*\), which has ended, but .*fuser"):
        DirectoryLock.acquire(tmp_path, "second-run")
    lock.release()


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_save_directory_that_was_moved_while_training_is_named(tmp_path: Path, how: str) -> None:
    place, history = tmp_path / "ckpt", RunHistory("a")
    save(place, make_state(10), history)
    place.rename(tmp_path / "elsewhere")
    if how == "replaced":
        place.mkdir()
        (place / ".lock").touch()
    with pytest.raises(StorageError, match=r"was moved, removed or replaced .* iteration 20 is not saved"):
        save(place, make_state(20), history)
    assert loaded_equals(tmp_path / "elsewhere", make_state(10))
    history.close()


def test_a_directory_in_place_of_the_tracker_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / paths.TRACKER).mkdir()
    with closing(RunHistory("a")) as history, pytest.raises(ConfigError, match="is a directory, but a save writes"):
        hold_directory(tmp_path, parallel=one_process(), history=history)


def test_a_directory_that_takes_no_files_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / paths.LOCK).touch()  # of a run before: an immutable directory still opens it

    def immutable(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "touch", immutable)
    with closing(RunHistory("a")) as history, pytest.raises(StorageError, match="Operation not permitted"):
        hold_directory(tmp_path, parallel=one_process(), history=history)
