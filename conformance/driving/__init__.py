"""What the chapters drive engines with: the options of this run, levels, known failures, and codecs under test."""
