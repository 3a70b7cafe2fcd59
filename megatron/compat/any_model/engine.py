"""Trains any nn.Module: forward, backward and step, with the call order of DeepSpeed's engine.

    engine, optimizer, loader, scheduler = megatron.compat.initialize(model=model, optimizer=optimizer, config=config)
    for x, y in loader:
        loss = loss_of(engine(x), y)    # the user's own mean loss
        engine.backward(loss)
        engine.step()                   # acts once the accumulation is complete

Gradients are averaged over ranks and accumulated micro-batches. The engine uses the gradient buckets, the decision
about a step (unscale, clip, skip), the loss scaler and the checkpoints of the GPT.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.all_ranks import do_on_first
from megatron.compat.any_model.checkpoints import EngineCheckpoints, directory_of, write_weights
from megatron.compat.any_model.deepspeed_members import ATTRIBUTES, METHODS, check_assignment, deepspeed_member
from megatron.compat.any_model.engine_settings import EngineSettings
from megatron.compat.any_model.facts import Calls, EngineFacts
from megatron.compat.any_model.gradient_hooks import GradientHooks
from megatron.compat.any_model.guarded_shards import divided_now
from megatron.compat.any_model.kept_gradients import GuardedWeights, KeptGradients
from megatron.compat.any_model.loss_scale_lines import SEVERAL, line_after_skips
from megatron.compat.any_model.ranks import RankPlacement
from megatron.compat.any_model.schedule import scheduler_arguments
from megatron.compat.any_model.types_that_fit import TypesThatFit
from megatron.compat.any_model.usage import Usage
from megatron.compat.any_model.withheld import WithheldGrad
from megatron.compat.moving import moved
from megatron.engine.nonfinite import first_nonfinite, overflows_at_the_bottom
from megatron.errors import ConfigError, NonFiniteError
from megatron.optimizer import Optimizer, StepInfo
from megatron.utils.dtype import HALF
from megatron.utils.log import RankLog


class ModelEngine(EngineFacts):
    """Trains `module`, the user's model, in place."""

    def __init__(
        self,
        model: nn.Module,
        settings: EngineSettings,
        place: RankPlacement,
        grads: KeptGradients | GuardedWeights,
        core: Optimizer,
        usage: Usage,
        hooks: GradientHooks,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        training_dataloader: Any = None,
        log: RankLog | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.settings, self.place = settings, place
        self.optimizer, self.lr_scheduler, self.training_dataloader = optimizer, lr_scheduler, training_dataloader
        self._calls = Calls()
        self._grads, self._core, self._usage, self._hooks = grads, core, usage, hooks
        self.log = log or RankLog(place.parallel.rank)
        self._types = TypesThatFit(model, getattr(torch, settings.precision.params_dtype))
        self._frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
        self._checkpoints = EngineCheckpoints(self, core, grads if isinstance(grads, GuardedWeights) else None)
        optimizer.register_step_pre_hook(self._refuse_direct_step)

    # passes

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Runs the model. Input tensors are moved to the model's device. In half precision, floating-point inputs are
        cast to the model's dtype."""
        half = getattr(torch, self.settings.precision.params_dtype)
        half = None if half == torch.float32 else half
        inputs, named = moved(inputs, self.device, half), moved(named, self.device, half)
        try:
            return self.module(*inputs, **named)
        except RuntimeError as error:
            self._types.explain(error, [inputs, named])
            raise

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulates the gradients of this micro-batch's mean loss, divided by the number of accumulation steps.
        Returns the loss divided by the same number. With `scale_wrt_gas=False`, neither is divided."""
        self._check_loss(loss)
        share = 1.0 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        wide = loss.float() if loss.dtype in HALF else loss  # fp16 may overflow if multiplied by the loss scale
        factor = share * self._core.loss_scale
        try:
            self._expect_gradients()
            wide.backward(None if factor == 1.0 else torch.full_like(wide, factor), retain_graph=retain_graph)
            self._grads.withhold()
        except RuntimeError as error:
            self._types.explain(error, [])
            raise
        self._calls.owed = True
        return loss.detach() if share == 1.0 else loss.detach() * share

    def _expect_gradients(self) -> None:
        if not self._calls.begun:
            self._grads.zero()
            self._calls.begun = True
        else:
            self._grads.expect()
        self._calls.armed = self.is_gradient_accumulation_boundary() and not self._calls.adds_up
        if self._calls.armed:
            self._grads.arm()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Counts a micro-batch. After the last micro-batch of an accumulation, reduces and clips the gradients, updates
        the weights, and calls the scheduler's step() with `lr_kwargs`."""
        if self._calls.adds_up:
            raise ConfigError(
                "engine.step(): was called inside no_sync(), which only adds up gradients; call it after the block"
            )
        if not self._calls.owed:
            raise ConfigError(
                "engine.step(): there was no engine.backward(loss) since the last engine.step(); call both, in this "
                "order, once for every micro-batch"
            )
        updates = self.is_gradient_accumulation_boundary()
        if updates and not self._calls.armed:
            raise ConfigError(
                "engine.step(): set_gradient_accumulation_boundary(True) was called after the last backward pass; call "
                "it before that pass"
            )
        arguments = scheduler_arguments(self.lr_scheduler, lr_kwargs, self.place.parallel.dp) if updates else {}
        self._calls.micro_steps += 1
        self._calls.counted += 1
        self._calls.owed = False
        if updates:
            self._calls.begun = self._calls.armed = False
            self._calls.counted = 0
            self._update(arguments)

    def _update(self, arguments: Mapping[str, Any]) -> None:
        self._usage.reduce()
        scale = self._core.loss_scale * self.place.parallel.dp.size
        self._hooks.call(self._grads, scale, self._usage.absent())
        self._calls.updating = True
        try:
            info = self._core.client_step(scale)
        finally:
            self._calls.updating = False
        self._calls.global_steps += 1
        self._calls.global_samples += self.train_batch_size()
        self._calls.norm, self._calls.overflow = info.grad_norm, info.skipped
        self._usage.share_buffers()
        if info.skipped:
            self._check_skipped(info)
        self._grads.zero()  # the loss of another model may still add gradients to this one; the next update drops them
        every = self.settings.log_interval
        if every is not None and self.global_steps % every == 0:
            self.log.info(
                f"step {self.global_steps}: learning rate {', '.join(f'{lr:g}' for lr in self.get_lr())}, gradient "
                f"norm {info.grad_norm:.4g}, {self.skipped_steps + info.skipped} skipped"
            )
        if not info.skipped:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**arguments)
            return
        self._calls.skipped_steps += 1
        self.log.info(
            f"step {self.global_steps} is skipped: a gradient overflows at the loss scale {info.loss_scale:g}; the "
            f"next step uses {self._core.loss_scale:g}"
        )
        if info.skipped_in_a_row == SEVERAL:
            self.log.info(line_after_skips(self._core.loss_scale, self.settings.precision))

    def _check_skipped(self, info: StepInfo) -> None:
        """Accepts an overflow while the loss scale adapts, else raises. All ranks call it to find the cause."""
        what: str | None = "a gradient is not finite"
        if not self._core.static_scale:
            what = overflows_at_the_bottom(self._core, info.loss_scale, info.skipped_in_a_row)
        if what is None:
            return
        first = first_nonfinite(self._core, self.place.parallel)
        raise NonFiniteError(
            f"step {self.global_steps}: {what}{f'; {first}' if first else ''}. The update was not made. Load the last "
            "checkpoint, lower the learning rate, or check the data of this step"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes accumulate gradients, without a step() after each. The first backward pass
        and step() after the context reduce all of these gradients."""
        if self._calls.owed:
            raise ConfigError("engine.no_sync(): the last backward pass needs engine.step(); call engine.step() first")
        self._calls.adds_up = True
        try:
            yield
        finally:
            self._calls.adds_up = self._calls.owed = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """No-op between updates, which begin with no gradients; raises in the middle of an accumulation."""
        del set_to_none
        if self.accumulated:
            raise ConfigError(
                f"engine.zero_grad(): would drop the gradients of {self.accumulated} of "
                f"{self.gradient_accumulation_steps()} micro-batches of this update; remove the call, because every "
                "update begins without gradients"
            )

    def compile(self, backend: str | Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compiles the model's forward pass with torch.compile."""
        if isinstance(self._grads, GuardedWeights):
            raise ConfigError(
                f"engine.compile(): not supported at stage {self.settings.zero_stage} of ZeRO, where weights are "
                "gathered layer by layer; use stage 0 or 1"
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        return self.module._compiled_call_impl is not None

    def destroy(self) -> None:
        """Ends training by this engine. At stages 0 and 1, another engine or a plain torch loop can then train the
        model."""
        self._grads.close()
        for one in self.module.parameters():
            if isinstance(one.grad, WithheldGrad):
                one.grad = None
        self._calls.destroyed = True

    # checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Commits the whole state as SAVE_DIR/TAG, by default global_stepN. Also names it in SAVE_DIR/latest, unless
        `save_latest` is false. All ranks call it."""
        if exclude_frozen_parameters:
            raise ConfigError(
                "save_checkpoint: exclude_frozen_parameters is not supported, because a checkpoint holds the whole "
                "model; remove it, or use save_16bit_model(save_dir, exclude_frozen_parameters=True)"
            )
        self._grads.check_writes()
        self._checkpoints.save(
            directory_of("save_checkpoint: save_dir", save_dir),
            None if tag is None else str(tag),
            client_state or {},
            save_latest=save_latest,
        )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Loads the state of LOAD_DIR/TAG, by default the tag in LOAD_DIR/latest. Returns its path and the
        `client_state`. All ranks call it."""
        if not load_module_strict or custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint: load_module_strict=False and custom_load_fn are not supported, because a "
                "checkpoint fits only the model that saved it; remove them, or use "
                "engine.module.load_state_dict(state, strict=False)"
            )
        path, client_state = self._checkpoints.load(
            directory_of("load_checkpoint: load_dir", load_dir),
            None if tag is None else str(tag),
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            weights_only=load_module_only,
        )
        return path, client_state

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Returns the model's state dict with whole tensors, also where ranks shard them. All ranks call it."""
        if not isinstance(self._grads, GuardedWeights):
            return dict(self.module.state_dict())
        self._grads.check_writes()
        return self._grads.whole_state_dict()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Returns the model's state dict, without a collective; raises where ranks shard the weights."""
        if isinstance(self._grads, GuardedWeights):
            raise ConfigError(
                f"engine.module_state_dict(): each rank has only a part of the weights at stage "
                f"{self.settings.zero_stage} of ZeRO; call engine.whole_state_dict() on all ranks"
            )
        return self._without_frozen(self.whole_state_dict(), exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the model's whole state dict, in its training dtype, for torch.load. All ranks call it."""
        path = directory_of("save_16bit_model: save_dir", save_dir) / save_filename
        state = self._without_frozen(self.whole_state_dict(), exclude_frozen_parameters)
        do_on_first(lambda: write_weights(path, state), self.place.parallel.world)
        return True

    save_fp16_model = save_16bit_model

    def _without_frozen(self, state: dict[str, Tensor], asked: bool) -> dict[str, Tensor]:
        frozen = [
            name
            for name, one in self.module.named_parameters(remove_duplicate=False)
            if asked and not one.requires_grad
        ]
        return {name: tensor for name, tensor in state.items() if name not in frozen}

    # refusals

    def _check_loss(self, loss: Tensor) -> None:
        if hasattr(loss, "device_mesh"):  # a DTensor, made from shards
            raise divided_now("engine.backward(loss)")
        if self._calls.destroyed:
            raise ConfigError(
                "engine.backward(loss): engine.destroy() was called; call megatron.compat.initialize() again"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"engine.backward(loss): the loss is {found}, not one number; give the mean, loss.mean()")
        if not self.module.training:
            raise ConfigError(
                "engine.backward(loss): the engine is in evaluation mode; call engine.train() before the forward pass "
                "that trains"
            )
        if not loss.requires_grad:
            raise ConfigError(
                "engine.backward(loss): the loss has no gradient; compute it from engine(x), outside of torch.no_grad()"
            )
        thawed = [name for name, one in self._frozen if one.requires_grad]
        if thawed:
            raise ConfigError(
                f"engine.backward(loss): {thawed[0]} was frozen when megatron.compat.initialize() was called; it "
                "requires a gradient now, but would not be trained; call initialize() before you freeze it with "
                "requires_grad_(False)"
            )
        if self._calls.owed and not self._calls.adds_up and (self._calls.boundary is None or self._calls.armed):
            raise ConfigError(
                "engine.backward(loss): was called again before engine.step(); call engine.step() after every backward "
                "pass (it updates once the accumulation is complete), or add up losses before one backward pass"
            )

    def __deepcopy__(self, memo: Any) -> None:
        raise ConfigError(
            "copy.deepcopy(engine): an engine cannot be copied; copy the model before "
            "megatron.compat.initialize(), and fill the copy with load_state_dict(engine.whole_state_dict())"
        )

    def _refuse_direct_step(self, *_: Any) -> None:
        if not self._calls.updating:
            raise ConfigError(
                "optimizer.step(): the engine reduces the gradients and makes the update; call engine.step() instead"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> "ModelEngine":
        """Rejects `.to()`, `.half()` and the like if they would change a dtype or device, because buffers and masters
        would not follow."""
        for tensor in [*self.parameters(), *self.buffers()]:
            new = fn(tensor.detach())
            if (new.dtype, new.device) != (tensor.dtype, tensor.device):
                raise ConfigError(
                    f"engine.to(), .half(), .cuda(): the engine keeps the model on {tensor.device} as {tensor.dtype}; "
                    "remove the call, and set the precision in the config (fp16, bf16)"
                )
        return self

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model, or else a member of DeepSpeed's engine from deepspeed_members.py."""
        modules = self.__dict__.get("_modules", {})
        if name in modules:  # fast path: every step reads `module`, which torch looks up last
            return modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            model = self._modules["module"]
            known = name in METHODS or name in ATTRIBUTES
            return deepspeed_member(name) if known and not hasattr(model, name) else getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        check_assignment(name)
        super().__setattr__(name, value)
