"""The client's side of an update: calls, HTTP, status. Nothing here imports vLLM."""
