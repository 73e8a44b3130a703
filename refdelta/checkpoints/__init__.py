"""Checkpoints of safetensors shards: reading, patching, comparing, verifying."""
