"""The half of the suite that drives a live vLLM engine and judges every bit of its weights."""
