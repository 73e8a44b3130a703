"""What is assumed of vLLM, one module a kind, and checked at start."""
