"""The exceptions that are one sentence for whoever runs the program."""


class UserError(ValueError):
    """A mistake in the input: a recipe, a path, a file, a layout.

    The message is one sentence that names the thing, its value and what would be right. The CLI
    prints it without a traceback and exits with status 2.
    """


class MachineError(UserError):
    """What nobody did wrong, and the same command may find mended: a rank that did not arrive.

    Exit status 1, by which launch scripts start again.
    """
