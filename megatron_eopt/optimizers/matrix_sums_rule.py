"""Muon whose updates depend on sums over whole matrices, of which each rank stores parts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_eopt.optimizers.exchange import ParamWithGrad
from megatron_eopt.optimizers.muon_rule import MuonRule
from megatron_eopt.optimizers.stored_matrices import MatrixSums, StoredMatrices
from megatron_eopt.optimizers.update_rule import ParamGroup


class MatrixSumsRule(MuonRule):
    """Muon that changes its updates by sums over whole matrices, before it applies them.

    All updates of a step are there before :meth:`use_totals` gets the first sums, since one
    all-reduce adds up those of all ranks.
    """

    sums_per_matrix = 1  # how many sums :meth:`partial_sums` returns

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sums = MatrixSums(self.shards, self.exchange.device, self.exchange.sharing)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the tensors that stay in memory between steps, other than weights and state."""
        yield from super().buffers()
        yield from self._sums.tensors

    def stored_matrices(self, number: int) -> StoredMatrices:
        """Return the matrices in the tensor of a shard, for :meth:`partial_sums`."""
        return self._sums.stored[number]

    def partial_sums(self, item: ParamWithGrad, update: Tensor) -> Sequence[Tensor]:
        """Return sums over what this rank stores of each matrix; a hook for subclasses.

        It may change the update in place.

        Returns:
            As many as :attr:`sums_per_matrix`, each float64 ``(matrices,)``, as
            ``stored_matrices(item.number).sums`` returns them.
        """
        raise NotImplementedError

    def use_totals(self, item: ParamWithGrad, update: Tensor, totals: Tensor) -> None:
        """Change an update in place, before weight decay and learning rate; a hook for subclasses.

        ``totals`` has the sums of :meth:`partial_sums` over all ranks, float64
        ``(sums_per_matrix, matrices)``.
        """
        raise NotImplementedError

    def _run(self, items: Mapping[int, ParamWithGrad], groups: Sequence[ParamGroup]) -> None:
        updates: dict[int, Tensor] = {}
        sums: dict[int, Sequence[Tensor]] = {}

        def wait(arrived: Sequence[ParamWithGrad], their: Mapping[int, Tensor]) -> None:
            updates.update(their)
            sums.update({i.number: self.partial_sums(i, their[i.number]) for i in arrived})

        self.exchange.run(items, self._directions, wait, self.host, keep=True)
        # of all shards, because the all-reduce must have the same size on all ranks
        totals = self._sums.totals(range(len(self.shards)), sums, self.sums_per_matrix)
        self._apply_with_totals({n: items[n] for n in updates}, updates, totals)

    def _apply_with_totals(
        self,
        items: Mapping[int, ParamWithGrad],
        updates: Mapping[int, Tensor],
        totals: Mapping[int, Tensor],
    ) -> None:
        """Change weights once the sums over whole matrices are known."""
        item_of = {item.param: item for item in items.values()}

        def apply(params: Sequence[Tensor]) -> None:
            members = [item_of[param] for param in params]
            for item in members:
                self.use_totals(item, updates[item.number], totals[item.number])
            self._apply(members, updates)

        if self.host is None:
            apply(list(item_of))
        else:
            # the waves have moved weights and state back to the host
            state = {param: item.state for param, item in item_of.items()}
            self.host.step_in_chunks(item_of, apply, state)
