"""Plugin modules of backends, as the suite reads them; none is ever imported."""
