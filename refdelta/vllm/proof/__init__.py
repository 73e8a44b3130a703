"""What an engine holds is compared with its checkpoint and its map, before and after updates."""
