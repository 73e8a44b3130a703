"""The golden vectors: how they are made, and how engines' tests read them."""
