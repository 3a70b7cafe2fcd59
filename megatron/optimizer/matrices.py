"""Assembles whole matrices for update rules that need them; one rank computes the update of each matrix.

A matrix split by tensor parallelism is gathered over its ranks. A fused matrix is taken apart into its linear maps:
queries, keys and values of QKV; gate and up of a gated MLP. The matrices are distributed over all ranks that hold them.
Every rank computes its share at the same time, and the results are broadcast back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.distributed import collectives
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import Axis
from megatron.state.division import Range
from megatron.state.shard import Shard

Fused = tuple[int, tuple[int, ...]]
"""Dimension of a logical view along which the linear maps lie, and the length of each."""
Update = Callable[[Tensor], Tensor]
"""Maps one whole linear map to another matrix of its shape and dtype."""


@dataclass(frozen=True)
class Matrix:
    """Weight matrix, and the ranks that hold parts or copies of it."""

    spec: Shard
    """The part of the matrix that this rank holds."""
    tp: Axis
    """Tensor-parallel ranks that split the matrix; an axis of size 1 if the matrix is not split."""
    copies: Axis
    """Data-parallel ranks, which hold the same part."""
    columns: int
    """Number of columns of the whole stored matrix."""
    fused: Fused | None = None

    @property
    def work(self) -> int:
        """Estimate of the computing time, in arbitrary units."""
        rows = prod(self.spec.logical_shape) // self.columns
        return rows * self.columns * min(rows, self.columns)

    def maps(self, whole: Tensor) -> list[Tensor]:
        """Linear maps of the whole parameter, as matrices; views where possible."""
        view = whole.view(self.spec.logical_shape)
        parts = [view] if self.fused is None else view.split(self.fused[1], self.fused[0])
        return [part.reshape(-1, self.columns) for part in parts]

    def joined(self, maps: Sequence[Tensor]) -> Tensor:
        """Joins what `maps` took apart: contiguous, in the logical shape."""
        shape = self.spec.logical_shape
        if self.fused is None:
            return maps[0].contiguous().view(shape)
        dim, sizes = self.fused
        parts = [part.reshape(*shape[:dim], size, *shape[dim + 1 :]) for part, size in zip(maps, sizes, strict=True)]
        return torch.cat(parts, dim)


Owner = tuple[int, int]
"""Ranks on a matrix's `copies` and `tp` axes."""


def deal(matrices: Mapping[str, Matrix]) -> dict[str, Owner]:
    """Chooses the rank that computes each matrix: largest first, each to the least loaded rank. All ranks that hold the
    matrices get the same result."""
    owners: dict[str, Owner] = {}
    loads: dict[tuple[str, int, int], dict[Owner, int]] = {}
    for name, matrix in sorted(matrices.items(), key=lambda item: (-item[1].work, item[0])):
        ranks = [(copy, part) for copy in range(matrix.copies.size) for part in range(matrix.tp.size)]
        load = loads.setdefault((matrix.copies.name, matrix.copies.size, matrix.tp.size), dict.fromkeys(ranks, 0))
        owner = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner] += matrix.work
        owners[name] = owner
    return owners


class WholeMatrices:
    """Applies a function to whole matrices of which each rank holds a piece. A call is a collective, in the order of
    the matrices."""

    def __init__(self, grads: TrainingStore, matrices: Mapping[str, Matrix], update: Update) -> None:
        self._grads, self._matrices, self._update = grads, dict(matrices), update
        self._owners = deal(matrices)
        self._parts = _parts_by_rank(matrices)

    def __call__(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = list(pieces)
        mine: dict[str, Tensor] = {}
        for name in names:  # gathers all before it computes the first, so that no rank waits for another's result
            whole = self._whole(name, pieces[name])
            if self._is_mine(name):
                mine[name] = whole
        for name, whole in mine.items():
            matrix = self._matrices[name]
            mine[name] = matrix.joined([self._update(part) for part in matrix.maps(whole)])
        return {name: self._back(name, mine.get(name), pieces[name]) for name in names}

    def _is_mine(self, name: str) -> bool:
        matrix = self._matrices[name]
        return self._owners[name] == (matrix.copies.rank, matrix.tp.rank)

    def _whole(self, name: str, piece: Tensor) -> Tensor:
        matrix = self._matrices[name]
        local = self._grads.whole_of(name, piece.to(self._grads.device))  # the piece may be on the host
        if matrix.tp.size == 1:
            return local
        # Zeros: the simulated ranks of megatron/prove/order all hold this rank's part, so the rest is never set.
        whole = local.new_zeros(matrix.spec.logical_shape)
        parts = collectives.all_gather(local, matrix.tp)
        for spec, part in zip(self._parts[name], parts, strict=True):
            spec.put(whole, part)
        return whole

    def _back(self, name: str, result: Tensor | None, piece: Tensor) -> Tensor:
        """Broadcasts a result from its owner to the ranks that split the matrix, then from each of these to the
        replicas of its part."""
        matrix, (copy, part) = self._matrices[name], self._owners[name]
        shape = self._grads.parameter(name).shape
        if matrix.tp.size > 1 and matrix.copies.rank == copy:
            whole = self._empty(matrix.spec.logical_shape, piece.dtype) if result is None else result
            result = matrix.spec.take(collectives.broadcast(whole, matrix.tp, part))
        local = self._empty(shape, piece.dtype) if result is None else result.reshape(shape).contiguous()
        return self._grads.part_of(name, collectives.broadcast(local, matrix.copies, copy)).to(piece.device)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._grads.device)


def _parts_by_rank(matrices: Mapping[str, Matrix]) -> dict[str, list[Shard]]:
    """Part of each split matrix that every tensor-parallel rank holds. A collective."""
    tp = next((matrix.tp for matrix in matrices.values() if matrix.tp.size > 1), None)
    if tp is None:
        return {}
    split = {name: matrix for name, matrix in matrices.items() if matrix.tp.size > 1}
    mine = {name: matrix.spec.held for name, matrix in split.items()}
    found = all_gather_json(mine, tp, dict[str, tuple[Range, ...]])
    return {
        name: [replace(matrix.spec, ranges=ranks[name], copies=()) for ranks in found] for name, matrix in split.items()
    }
