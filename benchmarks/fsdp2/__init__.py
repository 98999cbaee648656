"""Muon on DTensor shards: our step against torch.optim.Muon's and muon_fsdp2's."""
