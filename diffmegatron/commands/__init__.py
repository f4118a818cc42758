"""Commands of the command line; each calls the package that implements it."""
