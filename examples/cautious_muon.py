"""Cautious Muon (arXiv:2411.16085): drops entries that differ in sign from the gradient."""

from megatron_eopt import TensorParallelMuon, register_optimizer
from megatron_eopt.extending import MatrixSumsRule


class CautiousRule(MatrixSumsRule):
    """Scales what remains of a matrix by how many entries remain."""

    def partial_sums(self, item, update):
        """Return how many entries agree, in what this rank stores of each matrix."""
        agrees = update * item.param.grad > 0
        update.mul_(agrees)
        return [self.stored_matrices(item.number).sums(agrees)]

    def use_totals(self, item, update, totals):
        """Scale each matrix by its size over the number of entries that agree."""
        sizes = totals.new_tensor([rows * cols for rows, cols in self.shapes[item.number]])
        self.stored_matrices(item.number).multiply_(update, sizes / totals[0].clamp(min=1))


@register_optimizer(
    "cautious_muon", state_layout="matrix_update", prefixes=("cautious_muon", "muon")
)
class CautiousMuon(TensorParallelMuon):
    """Muon with this rule."""

    update_rule_class = CautiousRule
