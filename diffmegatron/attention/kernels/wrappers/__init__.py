"""Backends that call a library's plain (softmax) attention, once or twice for each map."""
