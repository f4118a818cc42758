"""Programs that are not part of the package and are run by hand from a checkout."""
