"""Every benchmark by its name, which is its module's; ``main`` takes its command line."""

BENCHMARKS = {
    "attention": "differential attention backends beside a Transformer's attention",
    "checkpoint": "saving and loading beside the disk itself, and the guard's cost per step",
    "chunks": "a ring's pairs of chunks, forward and backward",
    "compare_dex": "DEX on a pretrained model beside its controls",
    "cpu_step": "a training step on a CPU beside a plain loop over transformers' DiffLlama",
    "data": "tokenising, parts, the loader, start-up and up-sampling",
    "layer": "whole layers of kinds of attention side by side",
    "layer_operations": "operations and bytes of a layer outside the attention kernels",
    "study": "many training runs that a file describes, with intervals over seeds",
    "study_corpus": "the prepared corpus of the studies, from a text",
    "study_recall": "the corpus of associative recall of the studies",
    "study_text": "the English text of the studies, from public packages",
    "startup": "from the command to the first step on a CPU, phase by phase",
    "tune_attention": "block sizes of the Triton kernels, timed or as the compiler sees them",
}
