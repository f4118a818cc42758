"""Python imports this module at its start where its folder is on the path: add the import hook."""

import sys

from tests.transformer_engine.hook import Hook

sys.meta_path.insert(0, Hook())
