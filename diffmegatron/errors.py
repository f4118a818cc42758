"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """A mistake in the input: a recipe, a path, a file, a layout.

    The message is one sentence that names the thing, its value and what would be right. The CLI
    prints it without a traceback and exits with status 2.
    """
