"""What pytest runs: options, the run, its results and the report; how checks are driven."""
