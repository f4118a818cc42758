"""Parameters, FLOPs and memory of a recipe, computed without torch or a GPU.

ZeRO's padding and the overhead of the allocator are not counted. Temporary memory is an estimate.
"""
