"""Modules that multiprocessing's fork server imports once, for the child processes of tests.

All tests name this module, because a process has one fork server, whose preloaded modules the last
caller of ``set_forkserver_preload`` chooses.
"""

import gc

import pytest  # noqa: F401

import diffmegatron.data.prepare.prepare
import diffmegatron.training.compute.batches  # noqa: F401

# A collection in a child would copy the memory of all imported modules.
gc.freeze()
