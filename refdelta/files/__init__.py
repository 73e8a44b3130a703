"""Delta directories on disk: atomic writing, the safetensors container, strict JSON, reading and writing."""
