"""An update in a live engine: staged, agreed between ranks, written, audited."""
