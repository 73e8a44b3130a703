"""The algebra of deltas: bits, names, states, comparing, applying, composing. Nothing here opens a file."""
