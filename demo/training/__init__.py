"""Training of the demo model on one GPU: rows, model, optimiser, two phases."""
