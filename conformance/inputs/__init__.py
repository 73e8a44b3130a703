"""What the suite feeds engines with: states, malformed deltas, damaged files, checkpoints."""
