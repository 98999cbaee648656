"""Compare this package with torch.optim.Muon and AdamW in plain PyTorch, on small models."""
