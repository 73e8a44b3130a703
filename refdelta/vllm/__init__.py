"""Everything that imports vLLM."""
