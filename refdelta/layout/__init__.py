"""Where a checkpoint's tensors stand in a serving engine: boxes, maps, proofs, the rules of model families."""
