"""The quantizer: measures a model on data and writes a checkpoint."""
