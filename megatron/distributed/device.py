"""Chooses this process's device and the backend of its collectives."""

import torch
import torch.distributed as dist

from megatron.errors import ConfigError


def accelerator_type() -> str | None:
    """Type of accelerator that this torch can use here ("cuda", "npu", ...), or None."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def resolve_device(setting: str = "auto", local_rank: int = 0) -> torch.device:
    """Device of `--device`: "auto" prefers an accelerator to the CPU; "cuda" without an index is this rank's."""
    available = accelerator_type()
    if setting == "auto":
        setting = available or "cpu"
    try:
        device = torch.device(setting)
    except RuntimeError:
        raise ConfigError(f"--device {setting}: not a device that torch knows; use auto, cpu or cuda") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != available:
        here = f"cpu or {available}" if available else "cpu (torch finds no accelerator here)"
        raise ConfigError(f"--device {setting}: not available on this machine; use auto or {here}")
    index = local_rank if device.index is None else device.index
    count = torch.accelerator.device_count()
    if index >= count:
        raise ConfigError(
            f"--device {setting}: local rank {local_rank} needs {device.type}:{index}, but this machine has {count}; "
            f"start at most {count} processes on each machine"
        )
    return torch.device(device.type, index)


def activate(device: torch.device) -> None:
    """Makes `device` the current one, which a bare "cuda" (or "npu") refers to."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def resolve_backend(setting: str | None, device: torch.device, asked: str = "--distributed-backend") -> str:
    """Returns the given backend if it supports the device; default: the device's own."""
    own = dist.get_default_backend_for_device(device) if device.type != "cpu" else "gloo"
    chosen = setting or own
    if chosen != "gloo" and device.type == "cpu":
        raise ConfigError(f"{asked} {chosen}: needs an accelerator, but this run is on the CPU; use gloo, or remove it")
    if chosen not in ("gloo", own):
        raise ConfigError(f"{asked} {chosen}: does not support {device.type}; use {own} or gloo")
    if not dist.is_backend_available(chosen):
        raise ConfigError(f"{asked} {chosen}: this torch was built without it; use gloo")
    return chosen


def group_backend(backend: str, device: torch.device) -> str:
    """Backend string of a process group. CPU tensors always use gloo, so that Python objects need no device."""
    return "gloo" if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"
