"""No hub: what asks it is refused at once, as `HF_HUB_OFFLINE` does, and vLLM does not know.

With `HF_HUB_OFFLINE` vLLM looks for a model's directory itself, in the default cache; without, its loader looks in
``download_dir``, where it takes what is there when the hub cannot be reached.
"""

from __future__ import annotations

from huggingface_hub import constants

constants.is_offline_mode = lambda: True
