"""Muon with second moments as a torch optimizer: AdaMuon, NorMuon and NAMO."""

from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon

from megatron_eopt.optimizers.adaptive_settings import AdaptiveMuonSettings
from megatron_eopt.optimizers.muon import TensorParallelMuon


class TensorParallelAdaptiveMuon(AdaptiveMuonSettings, TensorParallelMuon, AdaptiveMuon):
    """Muon whose orthogonalized updates are divided by running second moments, then scaled.

    The arguments are those of :class:`AdaptiveMuonSettings`, which also says what the state is. As
    in emerging-optimizers, ``orthogonalize`` returns plain orthogonal factors, and ``step`` divides
    and scales them.
    """

    called = TensorParallelMuon.called
