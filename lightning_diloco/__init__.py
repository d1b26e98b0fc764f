"""Decoupled DiLoCo for PyTorch Lightning: `Trainer(strategy="decoupled_diloco")`."""
