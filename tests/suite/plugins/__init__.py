"""Plugin modules of backends, as the suite reads them; never imports them itself."""
