"""Names and descriptions of the benchmarks; each is a module whose ``main`` takes its arguments."""

BENCHMARKS = {
    "attention": "differential attention backends compared with a Transformer's attention",
    "checkpoint": "saving and loading compared with the disk, and the guard's cost per step",
    "chunks": "forward and backward pass of a pair of chunks in ring attention",
    "compare_dex": "DEX on a pretrained model compared with its controls",
    "coordinates": "changes of outputs in the first steps at several widths, with and without muP",
    "cpu_step": "a training step on a CPU compared with a plain loop over transformers' DiffLlama",
    "data": "tokenizing, preparing in parts, loader, start-up and up-sampling",
    "evaluation": "answers to the requests of suites one at a time, in batches, and by lm-eval",
    "gpu_report": "what one GPU computes, how fast, and whether it is right, in nine minutes",
    "lm_eval_engine": "the suite lm-eval compared with lm-eval's own engine",
    "kernel_resources": "resources of the Triton kernels with other block sizes, compiled only",
    "layer": "whole layers of several kinds of attention",
    "layer_operations": "operations and bytes of a layer without the attention kernels",
    "study": "many training runs from one study file, with intervals over seeds",
    "study_corpus": "prepare the corpus of the studies from a text",
    "study_recall": "generate the corpus of associative recall of the studies",
    "study_text": "collect the English text of the studies from public packages",
    "startup": "time from the command to the first step on a CPU, by phase",
}
