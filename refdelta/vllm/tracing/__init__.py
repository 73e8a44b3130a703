"""Layout maps from vLLM's own loader, run on tensors without memory."""
