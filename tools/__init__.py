"""Programs beside the package that are run by hand from a checkout."""
