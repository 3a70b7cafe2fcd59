"""Optimizer settings of each parameter: from the parameter table for GPT, by Megatron's rules for other models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.errors import ConfigError
from megatron.model.parameters import QKV, VOCABULARY_TABLES, Row
from megatron.optimizer import GroupRule, Matrix, megatron_rule
from megatron.parallelize import Parallel
from megatron.state.shard import Shard


def check_marked(config: OptimizerConfig, built: Parallel) -> None:
    """Rejects Muon for a script's own model that marks no matrices, because Muon would orthogonalise nothing."""
    if not config.uses_muon or built.rows:
        return
    marked = {name: p for name, p in built.model.named_parameters() if getattr(p, "use_muon", False)}
    for name, parameter in marked.items():
        if parameter.dim() != 2:
            raise ConfigError(
                f"--optimizer {config.optimizer}: {name} is marked with use_muon and has {parameter.dim()} dimensions; "
                "remove the mark, because only matrices are orthogonalised"
            )
    if not marked:
        raise ConfigError(
            f"--optimizer {config.optimizer}: no parameter of the model provider's {type(built.model).__name__} is "
            "marked for Muon; set parameter.use_muon = True on its matrices (not on embeddings or the output layer), "
            "or use --optimizer adam"
        )


@dataclass(frozen=True)
class Groups:
    config: OptimizerConfig
    rows: Mapping[str, Row]
    specs: Mapping[str, Shard]
    parallel: ParallelState

    def of(self, name: str, parameter: nn.Parameter) -> GroupRule:
        row = self.rows.get(name)
        if row is None:
            return replace(megatron_rule(name, parameter), matrix=self._marked(name, parameter))
        decays = row.decays or (self.config.apply_wd_to_qk_layernorm and row.is_qk_norm)
        return GroupRule(
            wd_mult=1.0 if decays else 0.0,
            decoupled=name in VOCABULARY_TABLES,
            matrix=self._matrix(name, row) if self._sees_whole(row) else None,
        )

    def _sees_whole(self, row: Row) -> bool:
        return row.is_linear_map if self.config.uses_muon else self.config.optimizer == "adafactor"

    def _marked(self, name: str, parameter: nn.Parameter) -> Matrix | None:
        """Matrix of a parameter of a script's own model, or None. Only the author knows which tensors are linear maps,
        so Muon needs them marked (`use_muon`). Tensor parallelism does not split such a model."""
        if self.config.optimizer != "adafactor" and not (
            self.config.uses_muon and getattr(parameter, "use_muon", False)
        ):
            return None
        return Matrix(
            spec=self.specs[name],
            tp=Axis.single("tp", self.parallel.rank),
            copies=self.parallel.dp_cp,
            columns=parameter.shape[1] if parameter.dim() == 2 else 1,
        )

    def _matrix(self, name: str, row: Row) -> Matrix:
        spec, parallel = self.specs[name], self.parallel
        if "embedding" in spec.replica_axes:  # two pipeline stages hold it, and both compute all of it
            spec = replace(spec, copies=())
        whole = self.config.muon_split_qkv is False and row.name == f"{QKV}.weight"
        return Matrix(
            spec=spec,
            tp=parallel.tp if row.split_dim is not None else Axis.single("tp", parallel.rank),
            copies=parallel.expert_dp if row.kind == "expert" else parallel.dp_cp,
            columns=prod(row.stored_shape[1:]),
            fused=None if whole else row.fused_maps,
        )
